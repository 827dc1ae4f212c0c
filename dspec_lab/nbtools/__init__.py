"""Notebook tools: run, lint, twin check, list."""
