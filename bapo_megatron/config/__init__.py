"""Settings: what each of them is, and how a configuration is read. Whether they fit together, preflight/ checks."""
