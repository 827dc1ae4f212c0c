"""Prompt sets, the paper's numbers, and comparisons with intervals. Import the module you need."""
