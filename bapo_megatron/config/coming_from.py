"""Names that other frameworks have for our settings: coming_from.toml, for suggestions and for docs/coming-from.md.

python -m bapo_megatron.config.coming_from        update the page's tables
"""

import tomllib
from functools import cache
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


@cache
def _frameworks() -> dict[str, dict[str, dict[str, str]]]:
    """Return framework -> topic -> their name -> our setting, with an optional remark in parentheses."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def their_settings() -> dict[tuple[str, ...], str]:
    """Return our setting by the parts of their name; of two frameworks that share a name, the first has it."""
    settings: dict[tuple[str, ...], str] = {}
    for topics in _frameworks().values():
        for names in topics.values():
            for theirs, here in names.items():
                settings.setdefault(_parts(theirs), here.partition(" (")[0].replace(" ", ""))
    return settings


def _parts(name: str) -> tuple[str, ...]:
    return tuple(name.lstrip("-").lower().replace("-", "_").split("."))


def meant_by(name: str, *, whole: bool = False) -> str | None:
    """Return the setting that another framework's name means; unless `whole`, the last parts of it suffice.

    Example: meant_by("actor.lr") == meant_by("--lr") == "optimizer.lr"
    """
    parts = _parts(name)
    starts = (0,) if whole else range(len(parts))
    return next((their_settings()[parts[start:]] for start in starts if parts[start:] in their_settings()), None)


def filled_page(text: str) -> str:
    """Put the table of each framework between its markers on the page."""
    for framework, topics in _frameworks().items():
        begin, end = f"<!-- {framework} -->", f"<!-- end of {framework} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        head = "elsewhere" if framework == "other" else framework
        rows = [f"| | {head} | here |", "|---|---|---|", *(_row(topic, names) for topic, names in topics.items())]
        text = "\n".join([before + begin, *rows, end + after])
    return text


def _row(topic: str, names: dict[str, str]) -> str:
    theirs = ", ".join(f"`{name}`" for name in names)
    return f"| {topic} | {theirs} | {', '.join(_shown(here) for here in dict.fromkeys(names.values()))} |"


def _shown(here: str) -> str:
    setting, mark, remark = here.partition(" (")
    return f"`{setting}`{mark}{remark}"


if __name__ == "__main__":
    _PAGE.write_text(filled_page(_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
