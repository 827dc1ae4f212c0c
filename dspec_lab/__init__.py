"""A lab for speculative decoding: draft cheaply, verify in one pass, keep the target's law exactly.

Importing the package loads nothing heavy; import the module you need, for example
`from dspec_lab.models.fetch import ensure_smollm2`.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
