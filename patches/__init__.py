"""Corrections of upstream packages: one folder per package, one file per upstream version.

They are importable as `bapo_megatron_patches` (see `package_dir` in setup.py). Every file says why it exists, which
upstream lines it corrects and when it can go.
"""
