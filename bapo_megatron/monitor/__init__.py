"""The run's folder, metrics and console, and its watchdogs."""
