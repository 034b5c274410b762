"""scripts/figures.py: a measured figure of README or docs has a source that says the same."""

from pathlib import Path

import figures
import pytest

SOURCE = """
[start]
total_s = 118
step_s = [2.5, 1.44]
num_tokens = 26351
"""
STUDY = """variant,figure,x,mean,low,high,seed 0,seed 1
K = 1,pass rate,,0.8,0.7,0.9,0.7,0.9
K = 4,pass rate,,0.5,0.4,0.6,0.4,0.6
K = 4,pass rate,1,0.25,0.2,0.3,,
"""
BENCHMARKS = """{"rows": [{"row": "logprobs", "case": "time, 512 tokens", "other": "Hugging Face", "unit": "CPU s",
"ratio": 2.194, "low": 2.17, "high": 2.24, "num_turns": 5, "ours": 0.197, "theirs": 0.441}]}"""
FROM_TABLE = "<!-- figures: m.toml start -->"
FROM_STUDY = "<!-- figures: s.csv K = 1 / pass rate; K = 4 - K = 1 / pass rate -->"
FROM_BENCHMARKS = "<!-- figures: b.json logprobs / time / Hugging -->"


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.values.cache_clear()
    for name, text in {"m.toml": SOURCE, "s.csv": STUDY, "b.json": BENCHMARKS}.items():
        (tmp_path / name).write_text(text)


def said(page: str) -> list[str]:
    return [f"{line}: {complaint}" for line, complaint in figures.complaints(page)]


@pytest.mark.parametrize(
    "page",
    [
        "no figure: 3 ranks, version 0.16.1, 2 x 4, `timeout_s=60 s`, Python 3.11",
        f"{FROM_TABLE}\nIt takes 118 s, a step 2.5 s or 1.4 s.",
        f"{FROM_TABLE}\n| a | b |\n|---|---|\n| 118 s | 26,351 tests |",
        f"{FROM_TABLE}\n    $ run\n\n    118 s\n\nAnd more.",
        f"{FROM_TABLE}\n```\nrun\n\n118s\n```",
        f"{FROM_STUDY}\n0.80 ± 0.14, and then -0.300 ± 0.000",
        f"{FROM_BENCHMARKS}\n2.19 (2.17 to 2.24) times the speed: 0.197 CPU s",
        f"{FROM_TABLE}\n{FROM_BENCHMARKS}\n118 s and 2.19x",
        "<!-- not measured: default of a setting -->\nIt waits 300 s.",
        "<!-- figures: s.csv K = 4 / pass rate @ 1 -->\nAt 1 it is 0.25, in the window [0.8, 1.2].",
        "0.25 without a unit, where no source is named",
        "<!-- generated: table -->\n| 7 s |\n\n| 8 s |\n<!-- end -->\n",
    ],
)
def test_a_figure_with_a_source_that_says_the_same_passes(page: str) -> None:
    assert said(page) == []


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("Text.\n\nIt takes 118 s.", '3: "118 s" names no source'),
        ("It takes 1.7x, or 44%.", '1: "1.7x" names no source'),
        ("44 % of 60 tests", '1: "44 %" names no source'),
        ("0.75 ± 0.02", '1: "0.75 ± 0.02" names no source'),
        ("between 2 and 3 GiB", '1: "2 and" names no source'),
        ("<!-- not measured: -->\n5 s", '2: "5 s" names no source'),
        (f"{FROM_TABLE}\nIt takes 119 s.", '2: "119 s" is not what its source says'),
        (f"{FROM_TABLE}\na\n\nIt takes 118 s.", '4: "118 s" names no source'),
        (f"{FROM_TABLE}\n    a\n\n    119 s", '4: "119 s" is not what its source says'),
        (f"{FROM_STUDY}\n0.81 ± 0.14", '2: "0.81 ± 0.14" is not what its source says'),
        (f"{FROM_STUDY}\n| 0.8 | 0.31 |", '2: "0.31" is not what its source says'),
        ("<!-- figures: s.csv K = 4 / pass rate @ 2 -->\n0.25", "2: s.csv has no figure K = 4 / pass rate @ 2"),
        (f"{FROM_STUDY}\n0.80 ± 0.13", '2: "0.80 ± 0.13" is not what its source says'),
        (f"{FROM_BENCHMARKS}\n2.2 times, then 3 times", '2: "3 times" is not what its source says'),
        ("<!-- figures: m.toml start.none -->\n118 s", "2: m.toml has no figure start.none"),
        ("<!-- figures: none.toml start -->\n118 s", "2: there is no file none.toml"),
        ("<!-- figures: s.csv K = 9 / pass rate -->\n0.80 ± 0.14", "2: s.csv has no figure K = 9 / pass rate"),
        ("<!-- generated: table -->\n| 7 s |\n<!-- end -->\n\n8 s", '5: "8 s" names no source'),
    ],
)
def test_a_figure_without_a_source_or_with_another_value_is_named_with_its_line(page: str, complaint: str) -> None:
    assert complaint in said(page)
