"""Figures: one function each, data in, a matplotlib Figure out; no global plotting state."""
