"""Drafters: the protocol start / propose / commit and one drafter a file."""
