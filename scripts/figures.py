"""Check that every measured figure in README.md, docs/ and benchmarks/README.md has a source that says the same.

    python scripts/figures.py [PAGE ...]        exit code 1 if a figure has no source, or differs from it

A figure is a number with a unit (5 s, 1.7x, 44 %, 3 GiB, 60 tests) or with an error (0.75 ± 0.02), in text and in code
blocks; where a source is named, each number with a decimal point, except in [brackets]. The comment right before its
paragraph, list, table or code block names the source:

    <!-- figures: docs/measured/resume.toml restarts.noticed_s; restarts.next_step_s -->
    <!-- figures: studies/results/staleness.csv K = 16 / pass rate; K = 16 - K = 1 / pass rate -->
    <!-- figures: studies/results/tokens.csv GRPO / profile/abs_log_ratio @ 0.05 -->
    <!-- figures: benchmarks/results.json clip-bounds / 1e6 tokens / literal loop -->
    <!-- not measured: defaults of settings -->

A key of a TOML file is a value or a table of values. `VARIANT / FIGURE` of a study is the mean over seeds, its
standard deviation, the lowest and the highest; `VARIANT - VARIANT / FIGURE` is the mean difference and its standard
error; `VARIANT / FIGURE @ X` is a point of a curve. A key of the benchmarks is the beginning of a row's group, case and
other side. Blocks that code writes (`<!-- generated: NAME -->` to `<!-- end -->`) need none: a test compares them with
the code.
"""

import csv
import functools
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plain_english import tracked

ROOT = Path(__file__).parents[1]
_NUMBER = r"[-+]?\d(?:[\d,]*\d)?(?:\.\d+)?"
_UNIT = r"(?:x| ?(?:times|%|ms|min|minutes?|hours?|h|s|seconds|CPU m?s|k?tok/s|[GM]i?B|words|tests))(?![\w/(])"
_FIGURE = re.compile(rf"(?<![\w.,:/`=\-])(?P<number>{_NUMBER})(?:{_UNIT}| ± (?P<error>\d+\.\d+))")
_RANGE = re.compile(rf"(?P<number>{_NUMBER}) (?:to|and|or) (?={_NUMBER}{_UNIT})")
_DECIMAL = re.compile(r"(?<![\w.,:/`=\[@-])(?P<number>[-+]?\d[\d,]*\.\d+)(?![\w.\]])")
_SOURCE = re.compile(r"^ *<!-- figures: (?P<file>\S+) (?P<keys>.+?) -->$")
_EXEMPT = re.compile(r"^ *<!-- not measured: .{4,} -->$")
_MARK = re.compile(r"^ *<!-- .* -->$")


class FiguresError(ValueError):
    """A source that cannot be read, or a key that it does not have."""


@dataclass(frozen=True)
class Block:
    """Lines between two empty ones, with the comments right before them; a code block is one, with its empty lines."""

    line: int
    marks: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Figure:
    """A number as it is written, with its unit."""

    start: int  # where it begins in its block
    shown: str
    value: float
    decimals: int


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page, but none that code writes."""
    lines: list[str] = []
    marks: list[str] = []
    first, fenced, generated = 0, False, False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if line.startswith("<!-- generated: "):
            generated = True
        if generated:
            generated = line != "<!-- end -->"
            continue
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if _MARK.match(line) and not lines and not fenced:
            marks.append(line)
            continue
        if line.strip() or fenced or (lines and _is_code(lines) and _continues(page, number)):
            first = first if lines else number
            lines.append(line)
            continue
        if lines:
            yield Block(first, tuple(marks), "\n".join(lines))
        lines, marks = [], []


def _is_code(lines: list[str]) -> bool:
    return lines[0].startswith("    ")


def _continues(page: str, number: int) -> bool:
    """Return whether an indented block continues after its empty line `number`, counted from 1."""
    after = page.splitlines()[number:]
    return bool(after) and after[0].startswith("    ")


def figures(text: str) -> Iterator[Figure]:
    """Yield the figures of a block, in order."""
    for match in _FIGURE.finditer(text):
        yield _figure(match, match["number"])
        if match["error"]:
            yield _figure(match, match["error"])
    for match in _RANGE.finditer(text):
        yield _figure(match, match["number"])


def decimals(text: str) -> Iterator[Figure]:
    """Yield the numbers of a block that have a decimal point."""
    return (_figure(match, match["number"]) for match in _DECIMAL.finditer(text))


def _figure(match: re.Match[str], number: str) -> Figure:
    digits = number.replace(",", "")
    return Figure(match.start(), match[0].strip(), float(digits), len(digits.partition(".")[2]))


@functools.cache
def values(file: str, key: str) -> tuple[float, ...]:
    """Return the numbers that a source has for a key.

    Raises:
        FiguresError: there is no such file or key.
    """
    path = ROOT / file
    if not path.is_file():
        raise FiguresError(f"there is no file {file}")
    if path.suffix == ".csv":
        found = _of_study(path, key)
    elif path.suffix == ".json":
        found = _of_benchmarks(path, key)
    else:
        found = _of_table(tomllib.loads(path.read_text(encoding="utf-8")), key)
    if not found:
        raise FiguresError(f"{file} has no figure {key}")
    return tuple(found)


def _of_table(table: Any, key: str) -> list[float]:
    for part in key.split("."):
        if not isinstance(table, dict) or part not in table:
            return []
        table = table[part]
    return list(_numbers(table))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield float(value)


def _of_study(path: Path, key: str) -> list[float]:
    variants, _, figure = key.rpartition(" / ")
    figure, _, at = figure.partition(" @ ")
    if at:
        points = [row for row in _rows(path) if (row["variant"], row["figure"]) == (variants, figure)]
        return [float(row[n]) for row in points if row["x"] == at for n in ("mean", "low", "high")]
    finals = {
        (row["variant"], row["figure"]): [float(v) for k, v in row.items() if k.startswith("seed") and v]
        for row in _rows(path)
        if not row["x"]
    }
    if (variants, figure) in finals:
        seeds = finals[variants, figure]
        return [statistics.fmean(seeds), statistics.stdev(seeds) if len(seeds) > 1 else 0.0, min(seeds), max(seeds)]
    parts = variants.split(" - ")
    for n in range(1, len(parts)):
        first, second = " - ".join(parts[:n]), " - ".join(parts[n:])
        if (first, figure) in finals and (second, figure) in finals:
            pairs = zip(finals[first, figure], finals[second, figure], strict=True)
            differences = [a - b for a, b in pairs]
            return [statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5]
    return []


@functools.cache
def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _of_benchmarks(path: Path, key: str) -> list[float]:
    group, *rest = key.split(" / ")
    case, other = [*rest, "", ""][:2]
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = [r for r in rows if r["row"] == group and r["case"].startswith(case) and r["other"].startswith(other)]
    return [float(row[name]) for row in found for name in ("ratio", "low", "high", "ours", "theirs")]


def complaints(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and what is wrong with a figure, for each that has no source or differs from it."""
    for block in blocks(page):
        shown = list(figures(block.text))
        sources = [match for mark in block.marks if (match := _SOURCE.match(mark))]
        if any(_EXEMPT.match(mark) for mark in block.marks):
            continue
        try:
            known = [v for s in sources for key in s["keys"].split("; ") for v in values(s["file"], key.strip())]
        except FiguresError as error:
            yield block.line, str(error)
            continue
        wrong, problem = shown, "names no source"
        if sources:
            shown += decimals(block.text)
            wrong = [figure for figure in shown if not any(_same(figure, value) for value in known)]
            problem = "is not what its source says"
        for start, text in dict.fromkeys((figure.start, figure.shown) for figure in wrong):
            yield block.line + block.text[:start].count("\n"), f'"{text}" {problem}'


def _same(figure: Figure, value: float) -> bool:
    """Compare a figure with a value, rounded to the figure's decimals; a sign may be left out."""
    half = 0.5 * 10**-figure.decimals + 1e-9
    return abs(abs(figure.value) - abs(value)) <= half


def main(names: Iterable[str]) -> int:
    """Print each complaint about the given pages, or about all; return the exit code."""
    found = 0
    for path in [Path(name) for name in names] or tracked(["README.md", "docs/*.md", "benchmarks/README.md"]):
        for line, complaint in complaints(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}: {complaint}")
            found += 1
    if found:
        print(f"{found} figures without a source that says the same; scripts/figures.py explains the comments")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
