"""`bapo eval`: a checkpoint on a file of problems. See docs/evaluation.md."""
