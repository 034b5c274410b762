"""Checks whether settings fit together: one file for each subject, called by `check_settings` in all.py.

`violations_of` in preflight/check.py calls `check_settings`, and calls functions.py and slurm.py directly.
"""
