"""The `dspec` command: one module a verb."""
