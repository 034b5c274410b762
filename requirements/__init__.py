"""Versions for pip, installed as the package `bapo_megatron_requirements`: `bapo doctor --versions` reads them here."""
