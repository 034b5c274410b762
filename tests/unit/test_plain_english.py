"""The check for phrases that read as translated (scripts/plain_english.py)."""

from pathlib import Path

import plain_english
import pytest

# Joined here, so that the check does not find them in this file.
AT_ONCE = " ".join(("at", "once"))
BESIDE = "be" + "side"
NO_NOUN = " ".join(("of", "the"))


def found(tmp_path: Path, name: str, *lines: str) -> list[tuple[int, str]]:
    """Return line and phrase of each fault in a file."""
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sorted((line, phrase) for line, phrase, _ in set(plain_english.faults(path)))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(["", "# it runs at", "# once and ends"], [(2, AT_ONCE)], id="comment over two lines"),
        pytest.param(["x = 1  # seconds", f"y = 2  # both run {AT_ONCE}"], [(2, AT_ONCE)], id="comment after code"),
        pytest.param(["", f"x = 1  # {NO_NOUN} run"], [(2, NO_NOUN)], id="comment without its noun"),
        pytest.param(
            ["def f(x):", '    """Do it.', "", "    Args:", f"        x: {NO_NOUN} run.", '    """'],
            [(5, NO_NOUN)],
            id="docstring argument",
        ),
        pytest.param(
            ['"""Do it.', "", "It ends at", "once.", '"""'],
            [(3, AT_ONCE)],
            id="docstring over two lines",
        ),
        pytest.param(
            ["def f():", '    """Do it.', "", "    It ends at", "    once.", '    """'],
            [(4, AT_ONCE)],
            id="docstring over two indented lines",
        ),
        pytest.param(
            ["x = 1", "y = (", '    f"{x} runs at "', '    f"once, {x}"', ")"],
            [(3, AT_ONCE)],
            id="f-string split over two literals",
        ),
        pytest.param(
            ["raise ValueError(", '    "all of them run at "', '    "once"', ")"],
            [(2, AT_ONCE)],
            id="message over two lines",
        ),
        pytest.param([f'x = f"{{1}} {AT_ONCE}"'], [(1, AT_ONCE)], id="f-string counts once"),
        pytest.param([f"{BESIDE} = 1"], [], id="names are not prose"),
        pytest.param([f'x = "it runs, {BESIDE} others"'], [(1, BESIDE)], id="string"),
    ],
)
def test_a_phrase_in_python_is_found_with_its_line(
    tmp_path: Path, lines: list[str], expected: list[tuple[int, str]]
) -> None:
    assert found(tmp_path, "module.py", *lines) == expected


def test_code_in_markdown_is_skipped(tmp_path: Path) -> None:
    page = [
        "# Title",
        "",
        f"`{AT_ONCE}` is code, but this runs {AT_ONCE}.",
        "",
        "```",
        f"echo {AT_ONCE}",
        "```",
        "",
        f"    echo {AT_ONCE}",
        "",
        "The end comes at",
        "once.",
    ]
    assert found(tmp_path, "page.md", *page) == [(3, AT_ONCE), (11, AT_ONCE)]


def test_comments_and_strings_of_toml_are_read(tmp_path: Path) -> None:
    table = ["# All of them", f"# run {AT_ONCE}.", "[table]", f'text = "{BESIDE} it"']
    assert found(tmp_path, "table.toml", *table) == [(2, AT_ONCE), (4, BESIDE)]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("module.py", f'x = "{AT_ONCE}, {BESIDE}"  # english: {{}}'),
        ("page.md", f"It runs {AT_ONCE}, {BESIDE} others. <!-- english: {{}} -->"),
        ("table.toml", f'text = "{AT_ONCE}, {BESIDE}"  # english: {{}}'),
    ],
)
def test_a_comment_allows_exactly_its_phrase_on_its_line(tmp_path: Path, name: str, line: str) -> None:
    other = line.partition("english")[0] + line.partition("{}")[2]
    both = {(2, AT_ONCE), (2, BESIDE)}
    assert set(found(tmp_path, name, line.format(AT_ONCE), other)) == {(1, BESIDE), *both}
    assert set(found(tmp_path, name, line.format(BESIDE), other)) == {(1, AT_ONCE), *both}
    assert {(1, AT_ONCE), *both} <= set(found(tmp_path, name, line.format("all of it"), other))


def test_the_repository_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = plain_english.main([])
    assert capsys.readouterr().out == ""
    assert exit_code == 0
