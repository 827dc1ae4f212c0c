"""Timing and run records."""
