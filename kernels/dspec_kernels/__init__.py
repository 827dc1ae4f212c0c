"""Triton kernels of speculative decoding, one file an op. `dspec_lab.kernels.dispatch` is their caller.

Nothing is tuned, compiled or sent to a device at import: block sizes follow from the shapes at the launch.
"""
