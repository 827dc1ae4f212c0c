"""Whether a trained drafter belongs to a target, said before the first token rather than by low acceptance."""

from __future__ import annotations

from dspec_lab.drafters.architecture import Architecture, MedusaArchitecture
from dspec_lab.models.protocol import Target


def check_target(arch: Architecture, target: Target, name: str) -> None:
    """Raise `ValueError` where the target's sizes are not those the drafter was trained with."""
    hidden = arch.spec.hidden_size if isinstance(arch, MedusaArchitecture) else arch.target_hidden_size
    for what, has, needs in (
        ("layers", target.num_layers, arch.num_target_layers),
        ("hidden units", target.hidden_size, hidden),
        ("vocabulary entries", target.vocab_size, arch.spec.vocab_size),
    ):
        if has != needs:
            raise ValueError(f"drafter {name} was trained for a target of {needs} {what}; {target.name} has {has}")
