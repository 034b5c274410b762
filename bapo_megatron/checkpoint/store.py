"""Checkpoints of a whole run: learner, rollout state and counters, saved together and atomically.

checkpoints/step-000020/{learner/, state.json, state.safetensors}     a folder appears only when it is complete
checkpoints/latest                                                     the name of the newest complete one

state.safetensors holds the arrays of the state, values of many tokens, named by their place in state.json.

Every rank writes its own files into .writing-step-000020. Once all ranks agree that they are done, rank 0 adds the
indices, flushes the disk and renames the folder. With `checkpoint.asynchronous` training continues meanwhile, and these
last steps happen at a later step boundary, because the writing threads never take part in collectives.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from bapo_megatron.checkpoint.arrays import attach, detached, read_arrays, write_arrays
from bapo_megatron.checkpoint.folder import (
    INDEX,
    STATE,
    STATE_FORMAT,
    checked,
    digest_of,
    read_index,
    read_sealed,
    seal,
)
from bapo_megatron.checkpoint.host_buffer import HostBuffer
from bapo_megatron.checkpoint.saving import Saving, flush, remove, replace_durably
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.errors import CheckpointError, TornCheckpointError, plural
from bapo_megatron.hf.writer import write_durably
from bapo_megatron.runtime.files import regular_file
from bapo_megatron.runtime.ranks import gather_json, rank_and_size
from bapo_megatron.runtime.together import first_complaint
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Natural

SAVE_TIMEOUT_S = 1800.0  # for one rank to write one checkpoint
_NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,17})")
_PARTIAL = ".writing-"


class _Part(TypedDict):
    version: Natural
    index: str  # the digest of its index.json


class _Head(TypedDict):
    """Fields that every state.json has."""

    step: Natural
    parts: dict[str, _Part]
    run: NotRequired[str]  # id of the run that saved it
    begin_anew: NotRequired[list[str]]  # parts that it does not hold and that a branch adds
    arrays: NotRequired[str]  # the digest of state.safetensors; absent without arrays


_HEAD = TypeAdapter(_Head)


class Saveable(Protocol):
    """A model with its optimizer, on every rank; see `learner.base.Learner`."""

    def snapshot(self) -> Snapshot: ...
    def load(self, folder: Path) -> None: ...


class CheckpointStore:
    """The checkpoints of a run. All ranks make the same calls; rank 0 renames and deletes.

    Args:
        warn: receives a message for each torn checkpoint that is skipped.
        state_type: a TypedDict that describes the whole state.json.
        run_id: the run (`RunDir.run_id`) whose checkpoints these must be. None means any run.
        vocab_size: the model's, for checking the tokens in state.json.
        streams: the model's, for checking the tokens in state.json.
        timeout_s: how long one rank may take to write one checkpoint; after that the run ends with an error.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        warn: Callable[[str], None] = print,
        state_type: Any = dict[str, Any],
        run_id: str | None = None,
        vocab_size: int | None = None,
        streams: Sequence[TokenStream] = (),
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        self.timeout_s = timeout_s
        self.folder = folder
        self._run_id = run_id
        self._of_tokens = {"vocab_size": vocab_size, "streams": streams}
        self._state = TypeAdapter(state_type)
        self._config = config
        self._warn = warn
        self._saving: Saving | None = None
        self._buffers: dict[str, HostBuffer] = {}  # by part; free while no save is in progress

    def latest(self) -> Path | None:
        """Return the checkpoint that `latest` names, or the newest if it names none. Not collective.

        Reads no other file.

        Raises:
            CheckpointError: `latest` names a missing folder.
        """
        candidates = self._candidates()
        if candidates is None:
            return None
        if not candidates or not (candidates[0] / STATE).is_file():
            raise CheckpointError(
                f"{self.folder / 'latest'} does not name a complete checkpoint; write the name of a complete folder in "
                f"{self.folder} into it, or choose another run.name to start over"
            )
        return candidates[0]

    # saving

    def save(self, step: int, parts: Mapping[str, Saveable], state: dict[str, Any] | None) -> Path:
        """Save after `step` steps, once the previous save is complete; return the checkpoint's path.

        With `checkpoint.asynchronous` the checkpoint appears there later.

        Args:
            parts: models by folder name.
            state: JSON, needed only on rank 0, copied now; its dicts may hold arrays, which must not change.

        Raises:
            CheckpointError: a rank could not write this save or the previous one; raised on every rank. The last
                complete checkpoint stays the latest.
        """
        self.close()
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f"{_PARTIAL}{final.name}"
        run = {} if self._run_id is None else {"run": self._run_id}
        plain, arrays = detached(state or {})
        body = json.loads(json.dumps({"format": STATE_FORMAT, "step": step, **run, **plain}))  # a copy
        snapshots = {name: part.snapshot() for name, part in parts.items()}
        if self._config.asynchronous:
            for name, snapshot in snapshots.items():
                snapshot.detach(self._buffers.setdefault(name, HostBuffer()))
        self._saving = Saving(partial, final, snapshots, body, arrays, self.timeout_s)
        self._prepare(partial, parts)
        self._saving.start()
        if not self._config.asynchronous:
            self.close()
        return final

    def poll(self) -> None:
        """Complete the save in progress if all ranks have written their part; call it at a step boundary.

        Raises:
            CheckpointError: see `save`.
        """
        if self._saving is not None and self._saving.has_ended():
            self._complete(self._saving)

    def close(self) -> None:
        """Complete the save in progress, waiting until `timeout_s` after it began.

        Raises:
            CheckpointError: see `save`.
        """
        if self._saving is not None:
            self._saving.wait()
            self._complete(self._saving)

    def _prepare(self, partial: Path, parts: Mapping[str, Saveable]) -> None:
        complaint = None
        try:
            if rank_and_size()[0] == 0:
                for torn in self.folder.glob(f"{_PARTIAL}*"):  # left by an attempt that was killed while it saved
                    remove(torn)
                for name in parts:
                    (partial / name).mkdir(parents=True)
        except OSError as error:
            complaint = str(error)
        self._discard_if_any_failed(complaint)

    def _complete(self, saving: Saving) -> None:
        """Publish the checkpoint, or discard it; the same on every rank."""
        self._discard_if_any_failed(saving.complaint())
        manifests = gather_json(saving.manifests)
        complaint = None
        if rank_and_size()[0] == 0:
            try:
                saving.complete(manifests)
                self._publish(saving)
            except (OSError, CheckpointError) as error:
                complaint = str(error)
        self._discard_if_any_failed(complaint)
        self._saving = None

    def _publish(self, saving: Saving) -> None:
        if saving.final.exists():  # left by a run that was later resumed from an earlier step
            old = self.folder / f"{_PARTIAL}{saving.final.name}.old"
            os.replace(saving.final, old)
            os.replace(saving.partial, saving.final)
            remove(old)
        else:
            os.replace(saving.partial, saving.final)
        flush(self.folder)
        replace_durably(self.folder / "latest", saving.final.name)
        self._delete_old(int(saving.final.name.removeprefix("step-")))

    def _discard_if_any_failed(self, complaint: str | None) -> None:
        found = first_complaint(complaint)
        if found is None:
            return
        assert self._saving is not None
        saving, self._saving = self._saving, None
        self._buffers = {}  # a late thread may still read the old ones
        if rank_and_size()[0] == 0:
            remove(saving.partial)  # it may be what filled the disk
        has_earlier = (self.folder / "latest").exists()
        left = "the previous checkpoint is still the latest" if has_earlier else "no checkpoint was saved before it"
        raise CheckpointError(f"cannot save {saving.final}: {found}; {left}")

    def _delete_old(self, step: int) -> None:
        """Keep the newest checkpoints up to `step`. Later ones, left by a rewind of `latest`, stay until rewritten."""
        for old in self._steps(step)[self._config.keep_last :]:
            remove(old)

    # resuming

    def resume(self, parts: Mapping[str, Saveable]) -> dict[str, Any] | None:
        """Restore the newest whole checkpoint; return the state saved with it, or None without a checkpoint.

        Torn checkpoints are skipped with a warning. Each file's digest is checked by one rank.

        Raises:
            CheckpointError: none is whole, one has another format or model, or a part refuses it; raised on every rank.
        """
        candidates = self._candidates() if rank_and_size()[0] == 0 else []
        names = gather_json(None if candidates is None else [path.name for path in candidates])[0]
        if names is None:
            return None
        complaints = []
        for path in (self.folder / name for name in names):
            torn = self._find_torn(path, parts)
            if torn is None:
                return self.load(path, parts)
            complaints.append(torn)
            self._warn(f"warning: skipping {path.name}: {torn}")
        found = "; ".join(complaints) or "there is no folder step-N"
        raise CheckpointError(
            f"no checkpoint in {self.folder} is whole: {found}; choose another run.name to start over"
        )

    @staticmethod
    def load(path: Path, parts: Mapping[str, Saveable]) -> dict[str, Any]:
        """Restore all parts without checking digests; return the state saved with them.

        Raises:
            CheckpointError: the checkpoint is torn, has another format, or a part refuses it.
        """
        state = _read_state(path)
        for name, part in parts.items():
            if name not in state.get("begin_anew", ()):
                part.load(path / name)
        return state

    def read(self, path: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the state of a checkpoint; this rank compares its share of the files with their digests.

        Args:
            names: the parts to check; None means all that it holds.

        Raises:
            TornCheckpointError: a file is missing, or differs from what was written.
            CheckpointError: it has another format, or another run saved it.
        """
        body = _read_state(path)
        self._check_run(path, body.get("run"))
        version = body["parts"].get("learner", {}).get("version")
        checked(self._state, body, path / STATE, {**self._of_tokens, "version": version})
        for name in body["parts"] if names is None else names:
            if name in body.get("begin_anew", ()):
                continue
            index, saved = read_index(path / name), body["parts"].get(name)
            tied = (index.facts["version"], digest_of(path / name / INDEX))
            if saved and (saved["version"], saved["index"]) != tied:
                raise TornCheckpointError(
                    f"{path / name / INDEX} belongs to another checkpoint, after {plural(tied[0], 'update')}; "
                    f"{STATE} was saved with the one after {saved['version']}"
                )
            if saved is None:
                raise TornCheckpointError(f"{path / STATE} was saved without {name}")
            index.verify(*rank_and_size())
        return body

    def _find_torn(self, path: Path, parts: Mapping[str, Saveable]) -> str | None:
        """Return why a checkpoint is torn, or None; raise CheckpointError if it is whole but unusable. Collective."""
        torn = unusable = None
        try:
            self.read(path, parts)
        except TornCheckpointError as error:
            torn = str(error)
        except CheckpointError as error:
            unusable = str(error)
        if (found := first_complaint(unusable)) is not None:
            raise CheckpointError(found)
        return first_complaint(torn)

    def _check_run(self, path: Path, saved: str | None) -> None:
        if saved is not None and self._run_id is not None and saved != self._run_id:
            run = self.folder.parent
            raise CheckpointError(
                f"{path} was saved by another run: {STATE} names the run id {saved}, and {run / 'run-id.txt'} says "
                f"{self._run_id}; remove it, or put the run's own there. To continue that other run here, write its "
                "id into run-id.txt; to start a new run from it, `bapo branch` that other run"
            )

    def _candidates(self) -> list[Path] | None:
        """List the checkpoint named by `latest` and older ones, newest first; all if it names none.

        Return None if there is no trace of a checkpoint.
        """
        pointer, named, why = self.folder / "latest", None, "names no checkpoint"
        try:
            named = _NAME.fullmatch(regular_file(pointer).read_text(errors="replace").strip())
        except OSError as error:
            why = f"cannot be read ({error.strerror or error})"
        if named is None:
            steps = self._steps()
            if not steps and not os.path.lexists(pointer):
                return None
            self._warn(f"warning: {pointer} {why}: continuing from the newest whole checkpoint")
            return steps
        first = self.folder / named[0]
        return [first, *(path for path in self._steps(int(named[1])) if path != first)]

    def _steps(self, newest: int | None = None) -> list[Path]:
        """List checkpoint folders up to step `newest`, newest first."""
        try:
            steps = [int(m[1]) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.folder}: {error.strerror or error}") from error
        return [self.folder / f"step-{n:06d}" for n in sorted(steps, reverse=True) if newest is None or n <= newest]


def _read_state(path: Path) -> dict[str, Any]:
    """Read state.json, and check that it names its own folder's step.

    Raises:
        TornCheckpointError: it is missing, altered, or names another step.
        CheckpointError: it has another format.
    """
    state = read_sealed(path / STATE, STATE_FORMAT)
    checked(_HEAD, state, path / STATE)
    if "arrays" in state:
        attach(state, read_arrays(path, state["arrays"]))
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != state["step"]:
        raise TornCheckpointError(
            f"{path / STATE} names step {state['step']}: it is another checkpoint's, or the folder was renamed"
        )
    return state


def branch_checkpoint(source: Path, target: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint with another state and the models of `source`, whose files it links, or copies.

    A link is enough, because no file of a checkpoint is ever changed in place; either may be deleted.

    Args:
        target: a new folder in a folder of checkpoints, whose `latest` will name it.
        state: the state as `CheckpointStore.read` returns it; `parts` names the models to take.

    Raises:
        CheckpointError, OSError: a file of `source` is gone, or the disk is full.
    """
    target.mkdir(parents=True)
    for file in (file for name in state["parts"] for file in (source / name).rglob("*") if file.is_file()):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        _link(file, copy)
    plain, arrays = detached({key: value for key, value in state.items() if key != "arrays"})
    if arrays:
        plain["arrays"] = write_arrays(arrays, target)
    write_durably(target / STATE, seal(plain))
    write_durably(target.parent / "latest", target.name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
