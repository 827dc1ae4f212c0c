"""Decoding loops: the lean plain loop, speculative rounds, and the audit of their output law."""
