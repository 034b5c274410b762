"""Checks before a run: its settings together, its needs (memory, time, layouts), and the machine.

Start at `check.violations_of`.
"""
