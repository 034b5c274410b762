"""The page of all settings is the one that the schema describes."""

from pathlib import Path

from bapo_megatron.config.document import document

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == document(), "run: python -m bapo_megatron.config.document > docs/configuration.md"


def test_every_setting_says_what_it_is() -> None:
    bare = [line for line in document().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert [line.split("`")[1] for line in bare] == []
