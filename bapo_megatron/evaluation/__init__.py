"""`bapo eval`: evaluate a checkpoint on a file of problems. Start at `run.evaluate`."""
