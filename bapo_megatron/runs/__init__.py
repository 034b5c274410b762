"""The folder of a run: what it is, and what is read from it."""
