"""Whether settings fit together: one file for each subject, all called by `check_settings` in all.py."""
