"""Rows of studies: they are appended whole or not at all, and say how long the rest takes; comparisons by Holm."""

import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bapo_megatron.errors import ConfigError, UserError
from studies.page import write
from studies.results import _t_test, figures_of, gather
from studies.rows import Points, Row, RowFile, seconds_left
from studies.study import Study

ROOT = Path(__file__).parents[2]
PAGE = {"title": "t", "figure": "f", "question": "q", "plots": [{"metric": "reward/mean"}]}


def make_row(variant: str = "A", seed: int = 0, code: str = "c" * 40, seconds: float = 60.0, **finals: float) -> Row:
    return Row(
        run=f"{variant}{seed}{code[:2]}",
        code=code,
        variant=variant,
        seed=seed,
        time="2026-01-01T00:00:00+00:00",
        machine="2 cores of Test",
        packages={"torch": "2.13.0"},
        seconds=seconds,
        finals=finals,
        curves={"reward/mean": Points(x=(8.0, 16.0), y=(0.25, None))},
    )


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
ROWS = st.builds(
    make_row,
    variant=st.text(min_size=1, max_size=5),
    seed=st.integers(0, 3),
    seconds=NUMBERS,
).flatmap(lambda row: NUMBERS.map(lambda value: row.model_copy(update={"finals": {"pass rate": value}})))


@given(st.lists(ROWS, max_size=4), ROWS, st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_that_was_cut_anywhere_is_as_if_it_had_not_begun(
    tmp_path_factory: pytest.TempPathFactory, before: list[Row], last: Row, data: st.DataObject
) -> None:
    file = RowFile(tmp_path_factory.mktemp("rows") / "mine.jsonl")
    for row in before:
        file.add(row)
    old, size = file.read(), file.path.stat().st_size if before else 0
    file.add(last)
    whole = file.path.read_bytes()
    cut = data.draw(st.integers(size, len(whole) - 2))  # without its newline, a line is whole
    file.path.write_bytes(whole[:cut])
    assert file.read() == old
    file.add(last)
    assert file.path.read_bytes() == whole
    assert [*file.read().values()][-1] == last


def test_the_last_row_of_a_run_counts(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "mine.jsonl")
    for row in (make_row("A", seconds=1.0), make_row("B"), make_row("A", seconds=2.0)):
        file.add(row)
    assert [(row.variant, row.seconds) for row in file.read().values()] == [("B", 60.0), ("A", 2.0)]


def test_code_is_of_the_latest_line(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "mine.jsonl")
    assert file.code() is None
    for code in ("a", "a", "b"):
        file.begin(code)
    assert (file.code(), file.read(), len(file.path.read_text().splitlines())) == ("b", {}, 2)
    file.add(make_row(code="c"))
    assert (file.code(), len(file.read())) == ("c", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda row: row | {"seed": "x"},
            r"mine.jsonl: a line is not a row of a study \(seed: Input should be a valid",
        ),
        (lambda row: {"step": 1}, r"not a row of a study \(run: Field required\); give another --output"),
    ],
)
def test_a_file_of_something_else(
    change: Callable[[dict[str, object]], dict[str, object]], message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps(change(make_row().model_dump())) + "\n")
    with pytest.raises(ConfigError, match=message):
        RowFile(tmp_path / "mine.jsonl").read()


def test_a_row_that_did_not_arrive_is_told(tmp_path: Path) -> None:
    class Deaf(RowFile):
        def read(self) -> dict[str, Row]:
            return {}

    with pytest.raises(UserError, match=r"does not hold the row that was just written"):
        Deaf(tmp_path / "mine.jsonl").add(make_row())


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "new" / "mine.jsonl")
    hold = f"import pathlib, studies.rows as r\nwith r.RowFile(pathlib.Path({str(file.path)!r})).held(): pass"
    with file.held():
        other = subprocess.run([sys.executable, "-c", hold], capture_output=True, text=True)
        assert "UserError: another process trains this study, and writes to" in other.stderr
    assert subprocess.run([sys.executable, "-c", hold]).returncode == 0


def test_time_left_is_that_of_the_same_variant() -> None:
    rows = [make_row("slow", 0, seconds=600), make_row("slow", 1, seconds=1800), make_row("fast", 0, seconds=60)]
    assert seconds_left({("fast", 1): 1.0}, rows, 8) == 60
    assert seconds_left({("slow", 2): 0.5, ("fast", 1): 1.0}, rows, 1) == 660
    assert seconds_left({("slow", 2): 0.5, ("fast", 1): 1.0}, rows, 2) == 330
    assert seconds_left({("new", 0): 1.0}, rows, 2) == 820
    assert seconds_left({}, rows, 2) == 0
    assert seconds_left({("new", 0): 1.0}, [], 2) is None


def test_holm_corrects_what_is_to_be_decided_and_not_what_is_explored() -> None:
    """Four comparisons over five seeds; p = 0.016 becomes 0.064, as the smallest of four."""
    shifts = {"a": 0.044, "b": 0.01, "c": 0.0, "d": 0.02, "e": 0.05}
    noise = [-0.03, 0.01, 0.02, -0.02, 0.02]
    rows = [make_row("base", seed, **{"pass rate": 0.5}) for seed in range(5)]
    for name, shift in shifts.items():
        rows += [make_row(name, seed, **{"pass rate": 0.5 + shift + noise[seed]}) for seed in range(5)]
    study = Study.model_validate(
        PAGE
        | {
            "seeds": range(5),
            "variants": [{"name": name} for name in ("base", *shifts)],
            "compare": [(name, "base") for name in "abcd"],
            "explore": [("e", "base")],
        }
    )
    *decided, explored = gather(study, rows).comparisons
    ps = [c.p for c in decided]
    assert all(p is not None for p in ps)
    p_a, p_b, p_c, p_d = (p or 0.0 for p in ps)
    assert p_a < p_d < p_b < p_c
    assert [c.holm_p for c in decided] == pytest.approx([4 * p_a, 2 * p_b, max(p_c, 2 * p_b), 3 * p_d])
    assert (explored.holm_p, explored.is_exploratory) == (None, True)
    assert explored.p is not None


def test_the_t_test_has_the_tables_quantiles() -> None:
    """Two-sided 0.05, with one, four and nine degrees of freedom."""
    for t, degrees in ((12.7062047364, 1), (2.7764451052, 4), (2.2621571628, 9)):
        assert _t_test(t, 1.0, degrees) == pytest.approx(0.05, abs=1e-10)
    assert _t_test(0.0, 1.0, 4) == 1.0


def test_without_a_spread_there_is_no_p() -> None:
    rows = [make_row(name, seed, **{"pass rate": rate}) for name, rate in (("a", 0.5), ("b", 0.25)) for seed in (0, 1)]
    study = Study.model_validate(
        PAGE | {"seeds": [0, 1], "variants": [{"name": "a"}, {"name": "b"}], "compare": [("a", "b")]}
    )
    (comparison,) = gather(study, rows).comparisons
    assert (comparison.difference, comparison.standard_error) == (0.25, 0.0)
    assert (comparison.p, comparison.holm_p) == (None, None)


def test_a_failed_run_is_in_no_mean_and_is_told(tmp_path: Path) -> None:
    pairs = [("a", 0.5, None), ("b", 0.25, None), ("c", 0.75, "20 updates in a row were skipped:\nnan")]
    rows = [make_row(name, 0, **{"pass rate": rate}) for name, rate, _ in pairs]
    rows += [
        make_row(name, 1, **{} if failure else {"pass rate": rate + 0.125}).model_copy(update={"failure": failure})
        for name, rate, failure in pairs
    ]
    rows.append(make_row("gone", 0).model_copy(update={"failure": "all failed"}))
    rows.append(make_row("gone", 1).model_copy(update={"failure": "all failed"}))
    study = Study.model_validate(
        PAGE
        | {
            "seeds": [0, 1],
            "variants": [{"name": name} for name in ("a", "b", "c", "gone")],
            "compare": [("a", "b"), ("c", "a"), ("gone", "a")],
        }
    )
    result = gather(study, rows)
    *_, c, gone = result.variants
    assert c.finals["pass rate"].by_seed == [0.75, None]
    assert (c.finals["pass rate"].mean, c.finals["pass rate"].std) == (0.75, None)
    assert gone.finals == {}
    assert [(x.first, x.second, x.num_seeds) for x in result.comparisons] == [("a", "b", 2), ("c", "a", 1)]
    assert result.comparisons[1].difference == 0.25
    write("mine", study, rows, result, folder=tmp_path, command="bapo reproduce mine")
    page = (tmp_path / "mine.md").read_text()
    assert "| c (1 of 2 seeds failed) | 0.750 |" in page
    assert "| gone (2 of 2 seeds failed) |" in page
    assert "Failed runs, which no figure above includes:\n\n- c, seed 1: 20 updates in a row were skipped: nan" in page
    assert "c,pass rate,,0.75,0.75,0.75,0.75,\n" in (tmp_path / "mine.csv").read_text()


def test_the_last_evaluations(tmp_path: Path) -> None:
    def finals(num_evals: int) -> dict[str, float]:
        steps = [{"version": float(i), "eval/reward": i / 16 if i < num_evals else math.nan} for i in range(20)]
        return figures_of(steps, [])[0]

    assert finals(12)["median of the last 10"] == 6.5 / 16
    assert finals(12)["worst of the last 10"] == 2 / 16
    assert "median of the last 10" not in finals(9)


def test_the_docs_count_the_comparisons_of_the_pages() -> None:
    """The last cell of a row is Holm's p, or p on a page with one comparison."""
    cells = [
        line.split("|")[-2].strip()
        for page in (ROOT / "studies" / "results").glob("*.md")
        for table in re.split(r"^\| \| against ", page.read_text(), flags=re.MULTILINE)[1:]
        if re.match(r"[^\n]*\| (p|Holm's p) \|\n", table)
        for line in table.splitlines()[2:]
        if line.startswith("|")
    ]
    said = tomllib.loads((ROOT / "docs" / "measured" / "reproduction.toml").read_text())["comparisons"]
    numbers = [float(cell) for cell in cells if cell]
    assert said["with_p"] == len(numbers)
    assert said["significant"] == sum(number < said["level_percent"] / 100 for number in numbers)
