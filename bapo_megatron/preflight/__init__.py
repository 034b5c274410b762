"""Checks before a run: its needs (memory, time, layouts), and whether this machine is fit for it."""
