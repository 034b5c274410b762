"""Whether settings fit together: one file for each subject, called by `check_settings` in all.py.

`violations_of` in preflight/check.py calls that, and functions.py and slurm.py itself.
"""
