"""Rollouts on disk: one run records them (`rollout.record`), another trains on them (`rollout.engine = "recorded"`).

    rollouts/step-000001.jsonl.gz      one judged group per line, exact to the last bit

A replay with the same settings reproduces every loss and bound; with another loss or advantage it shows their effect on
the same data.
"""

import contextlib
import gzip
import json
import os
import re
import tomllib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typing_extensions import TypedDict

from bapo_megatron.buffer.batch import BatchBuilder, BuilderState
from bapo_megatron.errors import CheckpointError, DataError, plural, wrong_fields
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.resolved import Resolved
from bapo_megatron.rollout.group_files import group_from_json, group_to_json
from bapo_megatron.rollout.shared import Rollouts
from bapo_megatron.runtime.files import explaining_os_errors, regular_file
from bapo_megatron.tokens import TokenStream, encoded_rows
from bapo_megatron.types import Batch, Group


def write_groups(folder: Path, step: int, groups: Sequence[Group]) -> Path:
    """Write the groups that step number `step` (from 1) trains, replacing the file of an earlier attempt.

    Raises:
        UserError: the disk is full or not writable.
    """
    path = _path(folder, step)
    partial = path.with_name(f".{path.name}.partial")
    with explaining_os_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(partial, "wt", encoding="utf-8", compresslevel=1) as file:
            for group in groups:
                file.write(json.dumps(group_to_json(group), default=encoded_rows) + "\n")
        os.replace(partial, path)
    return path


def read_groups(
    folder: Path, step: int, streams: Sequence[TokenStream] = (), max_response_tokens: int | None = None
) -> list[Group]:
    """Return the groups that `write_groups` wrote.

    Args:
        streams: the run's streams, which the samples must have: see `config.families.token_streams`. Rows of other
            streams are left out, so that a run without `model.replay_routes` can train on a recording with routes.
        max_response_tokens: this run's limit, which no response may exceed.

    Raises:
        DataError: the step is missing, or its file is damaged, or holds a longer response; names the file and the line.
    """
    path = _path(folder, step)
    if not path.exists():
        num_steps = len(recorded_steps(folder))
        raise DataError(
            f"{path} is missing: {folder} holds {plural(num_steps, 'recorded step')}; set train.num_steps to that or "
            "less, or rollout.recorded_from to the `rollouts` folder of a run with rollout.record=true"
        )
    groups = []
    try:
        with gzip.open(regular_file(path), "rt", encoding="utf-8") as file:
            for line in file:
                group = group_from_json(json.loads(line), streams, skip_others=True)
                if not (group.is_complete and group.valid):
                    raise ValueError("a response without a reward")
                groups.append(group)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as problem:
        why = wrong_fields(problem) if isinstance(problem, ValidationError) else problem
        raise DataError(f"{path}, line {len(groups) + 1} cannot be read: {why}; record it again") from problem
    if not groups:
        raise DataError(f"{path} is empty; record it again")
    for line_number, group in enumerate(groups, 1):
        longest = max(sample.num_sampled_tokens for sample in group.samples)
        if max_response_tokens is not None and longest > max_response_tokens:
            raise DataError(
                f"{path}, line {line_number}: a response of prompt {group.prompt.prompt_id} has "
                f"{plural(longest, 'token')}, more than rollout.max_response_tokens={max_response_tokens}; set it to "
                "what the samples were recorded with"
            )
    return groups


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps that a folder holds, ascending. A run that began as a branch has none of its parent's."""
    names = (re.fullmatch(r"step-(\d{6,})\.jsonl\.gz", path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def limit_of_recording(folder: Path) -> int | None:
    """Return rollout.max_response_tokens of the run that recorded into a folder; None if its config.toml is gone."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
        settings = tomllib.loads((folder.parent / "config.toml").read_text(encoding="utf-8"))
        return int(settings["rollout"]["max_response_tokens"])
    return None


class RecordedState(TypedDict):
    """`RecordedRollouts` in a checkpoint."""

    recorded_from: str
    batches: BuilderState


def kind_of_rollouts(state: Any) -> str:
    """Return "recorded" for a `RecordedState`, and "sampled" for the state of rollouts with engines."""
    return "recorded" if isinstance(state, dict) and "recorded_from" in state else "sampled"


class RecordedRollouts(Rollouts):
    """Rollouts from files. There is no engine to evaluate with, and no file stays open."""

    def __init__(self, run: Resolved) -> None:
        """Load the policy's tokenizer, to show samples."""
        config = run.config
        assert config.rollout.recorded_from is not None, "preflight/checks/rollout.py checks this"
        self._folder = Path(config.rollout.recorded_from).expanduser()
        self._tokenizer = load_tokenizer(run.folder, run.own)
        self._streams = run.kept_streams
        self._max_response_tokens = config.rollout.max_response_tokens
        self._builder = BatchBuilder(config)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def next_batch(self, step: int, version: int) -> tuple[Batch, list[Group]]:
        """Return the batch recorded for this step.

        Raises:
            DataError: the step was not recorded, or with a longer limit, or its run made more updates per step, so
                that tokens have no age here.
        """
        groups = read_groups(self._folder, step + 1, self._streams, self._max_response_tokens)
        newest = max((int(s.versions.max()) for g in groups for s in g.samples if s.num_sampled_tokens), default=0)
        if newest > version:
            raise DataError(
                f"{_path(self._folder, step + 1)} holds tokens of weight version {newest}, but this run is at version "
                f"{version}: use the train.minibatches_per_step x train.epochs_per_step that it was recorded with"
            )
        return self._builder.build(groups, {}), groups

    def state_dict(self) -> dict[str, Any]:
        return {"recorded_from": str(self._folder), "batches": self._builder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "recorded_from" not in state:
            raise CheckpointError(
                "the checkpoint is from a run with engines; `bapo branch` its run with rollout.engine=recorded, or give"
                " the replay another run.name"
            )
        self._builder.load_state_dict(state["batches"])


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.jsonl.gz"
