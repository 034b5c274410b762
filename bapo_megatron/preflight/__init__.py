"""Checks before a run: whether its settings fit together, its needs (memory, time, layouts), and the machine."""
