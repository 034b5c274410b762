"""`bapo eval`: evaluate a checkpoint on a file of problems. See docs/evaluation.md."""
