"""The page of all settings is the one that the schema describes."""

from write_configuration_page import PAGE, document


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == document(), "run: python scripts/write_configuration_page.py"


def test_every_setting_says_what_it_is() -> None:
    bare = [line for line in document().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert [line.split("`")[1] for line in bare] == []
