"""Write the tables of docs/coming-from.md from coming_from.toml: python scripts/write_coming_from_page.py."""

from pathlib import Path

from bapo_megatron.config.coming_from import frameworks

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"


def filled_page(text: str) -> str:
    """Put the table of each framework between its marks on the page."""
    for framework, topics in frameworks().items():
        if framework == "other":  # general names: only suggested
            continue
        begin, end = f"<!-- generated: coming-from {framework} -->", "<!-- end -->"
        before, rest = text.split(begin)
        _, _, after = rest.partition(end)
        rows = [f"| | {framework} | here |", "|---|---|---|", *(_row(topic, names) for topic, names in topics.items())]
        text = "\n".join([before + begin, *rows, end + after])
    return text


def _row(topic: str, names: dict[str, str]) -> str:
    theirs = ", ".join(f"`{name}`" for name in names)
    return f"| {topic} | {theirs} | {', '.join(_shown(here) for here in dict.fromkeys(names.values()))} |"


def _shown(here: str) -> str:
    setting, mark, remark = here.partition(" (")
    return f"`{setting}`{mark}{remark}"


if __name__ == "__main__":
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
