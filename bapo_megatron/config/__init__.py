"""Settings: what each one means, and how a configuration is read. preflight/ checks whether they fit together."""
