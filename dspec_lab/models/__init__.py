"""Targets: the protocol, table targets with a known law, the lean decoder and Hugging Face models."""
