"""Prompts to train on: our own generators, self-synthesis, and files."""
