"""Settings: what each one means, and how a configuration is read. Start at `schema.Config`, then `load.read_config`.

preflight/ checks whether they fit together.
"""
