"""What the documents and the rooms' docstrings say about where things are: every name exists."""

import ast
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest

from bapo_megatron.config.schema import Config

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bapo_megatron"
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def declared(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each name that statements declare, with the statements inside it."""
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.body
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, []


def is_in(name: str, path: Path) -> bool:
    """Return whether a file declares "function" or "Class.method"; files are read, not imported."""
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = dict(declared(body))
        if part not in found:
            return False
        body = found[part]
    return True


def test_names_are_found_only_where_they_are() -> None:
    path = PACKAGE / "rollout" / "book.py"
    assert is_in("RolloutBook.admit", path)
    assert not is_in("RolloutBook.begin", path)
    assert not is_in("admit", path)
    assert not is_in("Prompt", path), "imported there"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_where_to_start_reading(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    starts = re.findall(r"Start at\s`([\w.]+)`(?:, then `([\w.]+)`)?", text)
    assert len(starts) == 1, text
    for name in filter(None, starts[0]):
        module, _, inside = name.partition(".")
        path = room / f"{module}.py"
        assert is_in(inside, path) if inside and path.is_file() else is_in(name, room / "__init__.py"), name


def table() -> list[list[str]]:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Where is ...\n")[2].partition("\n## ")[0]
    return [row.strip("|").split("|") for row in section.strip().splitlines()[2:]]


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0].strip().strip("?"))
def test_an_answer_of_the_map_names_things_that_exist(row: list[str]) -> None:
    question, answer = row
    for setting in re.findall(r"`([\w.]+)`", question):
        reduce(getattr, setting.split("."), Config())
    path = None
    for name in re.findall(r"`([^`]+)`", answer):
        if name.endswith(".py"):
            continue
        place = re.search(rf"`{re.escape(name)}` \(`([\w/]+\.py)`\)", answer)
        path = PACKAGE / place[1] if place else path
        assert path is not None, f"{name} has no file"
        assert is_in(name, path), f"{name} is not in {path}"


STEP = re.compile(r"^    ((?:RolloutBook|Dispatcher|Annotators)\.\w+|advanced) ", re.MULTILINE)
PLACES = {"RolloutBook": "book", "Dispatcher": "dispatch", "Annotators": "annotators", "advanced": "drivers"}


def test_both_loops_take_the_steps_of_a_sample_s_life() -> None:
    rollout = PACKAGE / "rollout"
    steps = STEP.findall(ast.get_docstring(ast.parse((rollout / "__init__.py").read_text()), clean=False) or "")
    assert all(is_in(step, rollout / f"{PLACES[step.partition('.')[0]]}.py") for step in steps)

    def used(*files: str) -> set[str]:
        """Return the names that files use, through their imports and through methods that pass a step on."""
        nodes = [node for file in files for node in ast.walk(ast.parse((rollout / file).read_text()))]
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        # one call of all samples in a round; and the question about a group, of the question about all groups
        passed_on = {"grow_together": "grow", "waiting": "waiting_in"}
        return names | {step for name, step in passed_on.items() if name in names}

    names = {step.rpartition(".")[2] for step in steps}
    assert names <= used("scheduler.py"), "rounds"
    passed = {"advanced", "annotated", "answer", "settle", "choose"}
    assert passed < names
    assert names - passed <= used("continuous.py"), "the stream's own steps"
