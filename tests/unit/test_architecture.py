"""The house rules that a machine can check: who imports what, and how large a file may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bapo_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))
PURE = ("algorithms", "rewards", "buffer", "prompts", "config", "hf", "types.py", "errors.py")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", [f for f in FILES if name(f).split("/")[0] in PURE], ids=name)
def test_the_algorithm_knows_neither_megatron_nor_sglang(path: Path) -> None:
    assert [m for m in imported(path) if m.split(".")[0] in ("megatron", "sglang", "bapo_megatron_patches")] == []


def test_one_file_asks_for_parallel_state() -> None:
    asking = [name(f) for f in FILES if any("parallel_state" in m or m.endswith(".mpu") for m in imported(f))]
    assert asking == ["learner/parallel.py"]


def test_megatron_stays_in_the_learner() -> None:
    users = {name(f).split("/")[0] for f in FILES if any(m.split(".")[0] == "megatron" for m in imported(f))}
    assert users == {"learner"}


def test_nothing_is_unpickled() -> None:
    assert [
        name(f) for f in FILES if any(m.split(".")[0] in ("pickle", "dill", "cloudpickle") for m in imported(f))
    ] == []
    assert [name(f) for f in FILES if "torch.load(" in f.read_text() or "_object_list(" in f.read_text()] == []


def test_files_can_be_held_in_the_head() -> None:
    long = {name(f): n for f in FILES if (n := len(f.read_text().splitlines())) > 400}
    assert long == {}
