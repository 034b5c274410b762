"""Observing a run: its record, console, alarms, sinks and watchdogs. Start at `record.Recorder`."""
