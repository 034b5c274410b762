"""The shipped configurations, installed as the package `bapo_megatron_configs`: `bapo train demo` finds them here."""
