"""Other frameworks' names for our settings (coming_from.toml), for suggestions and docs/coming-from.md."""

import tomllib
from functools import cache
from pathlib import Path


@cache
def frameworks() -> dict[str, dict[str, dict[str, str]]]:
    """Return framework -> topic -> their name -> our setting, with an optional remark in parentheses."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def their_settings() -> dict[tuple[str, ...], str]:
    """Return our setting by the parts of their name; if two frameworks share a name, the first one's is used."""
    settings: dict[tuple[str, ...], str] = {}
    for topics in frameworks().values():
        for names in topics.values():
            for theirs, here in names.items():
                settings.setdefault(_parts(theirs), here.partition(" (")[0].replace(" ", ""))
    return settings


def _parts(name: str) -> tuple[str, ...]:
    return tuple(name.lstrip("-").lower().replace("-", "_").split("."))


def meant_by(name: str, *, whole: bool = False) -> str | None:
    """Return the setting that another framework's name means; unless `whole`, the last parts of the name suffice.

    Example: meant_by("actor.lr") == meant_by("--lr") == "optimizer.lr"
    """
    parts = _parts(name)
    starts = (0,) if whole else range(len(parts))
    return next((their_settings()[parts[start:]] for start in starts if parts[start:] in their_settings()), None)
