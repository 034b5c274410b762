"""What the user sees and keeps: run directory, metrics, console, report."""
