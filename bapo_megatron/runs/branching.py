"""Branches: the record of a run's parent, and the command that branches a run."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from bapo_megatron.config.load import as_override
from bapo_megatron.errors import UserError
from bapo_megatron.runtime import program
from bapo_megatron.runtime.files import reading, write_atomically

PARENT = "parent.json"


class Parent(NamedTuple):
    """The run that a branch comes from, as it was then."""

    run: str
    """Its absolute path."""
    step: int
    """Finished steps that both runs share."""
    changed: dict[str, tuple[Any, Any]]
    """Settings by name: the value in the parent and in the branch, None if unset."""

    @property
    def changes(self) -> str:
        """The changed settings in words."""
        return shown_changes(self.changed) or "no setting changed"


_PARENT = TypeAdapter(Parent)


def read_parent(run: Path) -> Parent | None:
    """Return the parent of a run, or None if it has none. Raises UserError if its record is damaged."""
    path = run / PARENT
    with reading(path):
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    try:
        return None if text is None else _PARENT.validate_python(json.loads(text))
    except ValueError as error:  # also pydantic's
        raise UserError(f"{path} is damaged; remove it, and the run no longer knows its parent") from error


def write_parent(run: Path, parent: Parent) -> None:
    """Write the record that `read_parent` reads. Raises UserError if the disk is full."""
    write_atomically(run / PARENT, json.dumps(parent._asdict(), indent=2, default=str) + "\n")


def shown_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return changed settings in words, such as "optimizer.lr: 0.001 -> 0.0003"."""

    def shown(value: Any) -> str:
        return "unset" if value is None else json.dumps(value, default=str)

    return ", ".join(f"{setting}: {shown(old)} -> {shown(new)}" for setting, (old, new) in changed.items())


def with_more_steps(values: Mapping[str, Any], num_done: int, num_steps: int | None) -> dict[str, Any]:
    """Return a branch's settings, with more steps if all of them are done: it would have nothing to do.

    Args:
        num_done: number of steps after which the branch starts.
        num_steps: train.num_steps, if it is known.
    """
    is_done = num_steps is not None and num_done >= num_steps
    return {**values, "train.num_steps": 2 * num_done} if is_done else dict(values)


def branch_command(run: Path, values: Mapping[str, Any], step: int | None = None) -> str | None:
    """Return the command that branches a run, or None if no command line can write the values.

    Args:
        values: the branch's settings that differ; None unsets.
        step: the checkpoint; None means the latest.
    """
    settings = [as_override(setting, value) for setting, value in values.items()]
    if None in settings:
        return None
    names = (f"{run.name}-{number}" for number in itertools.count(2))
    name = next(name for name in names if not run.with_name(name).exists())
    at = [] if step is None else ["--step", str(step)]
    return shlex.join([*program(), "branch", str(run), name, *filter(None, settings), *at])
