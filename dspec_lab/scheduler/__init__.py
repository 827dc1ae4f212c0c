"""How many drafted tokens to verify: what a round costs, and policies that weigh it against what the drafts promise."""
