"""Write the tables of docs/coming-from.md from coming_from.toml: python scripts/write_coming_from_page.py."""

from pathlib import Path

from bapo_megatron.config.coming_from import Hint, frameworks

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"


def filled_page(text: str) -> str:
    """Put the table of each framework between its marks on the page."""
    for framework, names in frameworks().items():
        if framework == "other":  # general names: only suggested
            continue
        begin, end = f"<!-- generated: coming-from {framework} -->", "<!-- end -->"
        before, rest = text.split(begin)
        _, _, after = rest.partition(end)
        by_hint: dict[Hint, list[str]] = {}
        for name, hint in names.items():
            by_hint.setdefault(hint, []).append(f"`{name}`")
        rows = [f"| {', '.join(theirs)} | {_shown(hint)} |" for hint, theirs in by_hint.items()]
        text = "\n".join([before + begin, f"| {framework} | here |", "|---|---|", *rows, end + after])
    return text


def _shown(hint: Hint) -> str:
    if not hint.setting:
        return hint.remark
    return f"`{hint.setting}`: {hint.remark}" if hint.remark else f"`{hint.setting}`"


if __name__ == "__main__":
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
