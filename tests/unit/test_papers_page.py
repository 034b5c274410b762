"""docs/papers.md: settings load, tests exist, no built-in loss or advantage or cited paper is missing, studies fit."""

import importlib
import re
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bapo_megatron.config.advantages import ADVANTAGE
from bapo_megatron.config.load import load_config, parse_override
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.schema import Config
from studies.study import load_study, plan_runs, shipped_studies

ROOT = Path(__file__).parents[2]
_PAPER = re.compile(r"(?<![\d./])\d{4}\.\d{5}(?!\d)")


class Row(NamedTuple):
    """A row of the page."""

    method: str
    source: str
    settings: str
    test: str
    seen: str

    @property
    def overrides(self) -> list[str]:
        return re.findall(r"`(\S+=\S+)`", self.settings)

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(\S+::\S+)`", self.test)

    @property
    def papers(self) -> set[str]:
        return set(_PAPER.findall(self.source))

    @property
    def studies(self) -> list[str]:
        return re.findall(r"\(\.\./studies/results/(\w+)\.md\)", self.seen)

    def is_in(self, config: Config) -> bool:
        """Return whether a run has all of the row's settings."""
        wanted = [parse_override(override) for override in self.overrides]
        return all(reduce(_part, path, config) == value for path, value in wanted)


def _part(section: Any, key: str) -> Any:
    return getattr(section, key, None)  # losses have different settings


LINES = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
ROWS = [Row(*line[2:-2].split(" | ")) for line in LINES if line.startswith("| ") and not line.startswith("| method ")]
METHODS = [row.method for row in ROWS]


@cache
def studied() -> dict[str, list[Config]]:
    """Return the configurations of each study's runs."""
    plans = {name: plan_runs(load_study(name), quick=False, runs_dir=Path("runs")) for name in shipped_studies()}
    return {name: [run.config for run in runs] for name, runs in plans.items()}


@pytest.mark.parametrize("row", ROWS, ids=METHODS)
def test_the_settings_load_and_are_in_force(row: Row) -> None:
    assert row.is_in(load_config(["demo"], row.overrides))
    assert row.overrides or row.settings.startswith("always: "), "no setting turns it on"


@pytest.mark.parametrize("row", ROWS, ids=METHODS)
def test_the_tests_exist_and_have_a_case_for_the_loss(row: Row) -> None:
    assert row.tests
    for test in row.tests:
        file, *names = test.split("::")
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"^ *(?:class|def) {name}\b", source, re.MULTILINE)] == []
        for loss in [name for name in LOSSES if row.overrides == [f"loss.name={name}"]]:
            function = getattr(importlib.import_module(f"tests.{file[:-3].replace('/', '.')}"), names[0])
            marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
            cases = [case for mark in marks for case in mark.args[1]]
            assert loss in cases or not any(name in cases for name in LOSSES), test


def test_every_built_in_loss_and_advantage_has_a_row() -> None:
    overrides = {override for row in ROWS for override in row.overrides}
    assert {o for o in overrides if o.startswith("loss.name=")} == {f"loss.name={name}" for name in LOSSES}
    assert {o for o in overrides if o.startswith("advantage.kind=")} == {f"advantage.kind={n}" for n in ADVANTAGE.names}
    assert len(set(METHODS)) == len(METHODS)


def test_every_paper_that_the_code_cites_has_a_row_and_a_loss_has_its_own() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "bapo_megatron").rglob("*.py")}
    cited = {paper: path for path, text in texts.items() for paper in _PAPER.findall(text)}
    every = set().union(*(row.papers for row in ROWS))
    assert {paper: path for paper, path in cited.items() if paper not in every} == {}
    for name, section in LOSSES.items():
        papers = set().union(*(row.papers for row in ROWS if f"loss.name={name}" in row.overrides))
        assert set(_PAPER.findall(section.__doc__ or "")) <= papers, name


def test_a_paper_is_linked_to_itself() -> None:
    links = re.findall(r"\[([^\]]+)\]\(https://arxiv\.org/abs/([^)]+)\)", "\n".join(LINES))
    assert len(links) == sum(len(_PAPER.findall(re.sub(r"\([^)]*\)", "", row.source))) for row in ROWS)
    assert [link for link in links if link[0] != link[1]] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.overrides], ids=lambda row: row.method)
def test_a_study_is_named_that_has_the_settings_or_none_has_them(row: Row) -> None:
    """tests/unit/test_docs_pages.py checks that linked files exist."""
    having = {name for name, configs in studied().items() if any(map(row.is_in, configs))}
    if row.seen == "not studied":
        assert having == set()
    else:
        assert set(row.studies) <= having
        assert "](" in row.seen
