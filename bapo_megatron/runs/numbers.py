"""Formatting of numbers for people."""

import math


def number(value: float, digits: int = 2) -> str:
    """Format a number: 0.534 -> "0.53", nan -> "-"."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def percent(share: float) -> str:
    """Format a share: 0.614 -> "61%", nan -> "-"."""
    return f"{share:.0%}" if math.isfinite(share) else "-"


def count(value: float) -> str:
    """Format a count: 1234 -> "1.2k", 2_500_000 -> "2.5M", nan -> "-"."""
    if not math.isfinite(value):
        return "-"
    for limit, divisor, suffix in ((999.5, 1, ""), (999_500, 1e3, "k"), (999_500_000, 1e6, "M")):
        if value < limit:
            scaled = value / divisor
            return f"{scaled:.{1 if suffix and scaled < 99.95 else 0}f}{suffix}"
    return f"{value / 1e9:.1f}G"


def short_number(value: float, digits: int = 4) -> str:
    """Format to a number of digits: 0.53412 -> "0.5341", 12346 -> "12.35K", 2.5e9 -> "2.5B", nan -> "-"."""
    if not math.isfinite(value):
        return "-"
    rounded = float(f"{value:.{digits}g}")
    size = min(4, int(math.log10(abs(rounded))) // 3) if abs(rounded) >= 1e4 else 0
    return f"{rounded / 1000**size:.{digits}g}{'KMBT'[size - 1 : size]}"


def duration(seconds: float) -> str:
    """Format a duration: 3725 -> "1 h 02 min", 245 -> "4 min 05 s", 12.3 -> "12.3 s", nan -> "-"."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def short_duration(seconds: float) -> str:
    """Format a duration in six characters: 12.3 -> "12.3s", 245 -> "4m05s", 3725 -> "1h02m", nan -> "-"."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"
