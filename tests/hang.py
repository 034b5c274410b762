"""The common deadline of tests, in a module that imports nothing: some processes are to import torch themselves."""

HANG_S = 3600.0  # only a hang misses it: over ten times the longest wait on two cores at load 20
