"""Many requests at once: the load they make, the real batch under it, and a simulator of batches too large to run."""
