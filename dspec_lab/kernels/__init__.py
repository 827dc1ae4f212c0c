"""Fused operations of drafting and verifying: a torch reference per file, Triton twins behind `dispatch`.

Import from `dspec_lab.kernels.dispatch`; nothing here needs Triton or a GPU to be imported.
"""
