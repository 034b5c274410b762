"""Checkpoints of a whole run: learner, rollout state and counters, saved together and atomically.

checkpoints/step-000020/{learner/, state.json}     a folder appears only when it is complete
checkpoints/latest                                  the name of the newest complete one

Every rank writes its own files into .writing-step-000020. Once all have, which they find out together, rank 0 adds the
indices, waits for the disk and renames the folder. With `checkpoint.asynchronous` training goes on while they write,
and the rest happens at a later step boundary: the threads that write take part in no collective.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from bapo_megatron.checkpoint.folder import FORMAT, INDEX, STATE, digest_of, read_index, read_sealed
from bapo_megatron.checkpoint.host_buffer import HostBuffer
from bapo_megatron.checkpoint.saving import Saving, flush, remove, replace_durably
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.errors import CheckpointError, TornCheckpointError
from bapo_megatron.runtime.ranks import first_complaint, gather_json, rank_and_size

_NAME = re.compile(r"^step-(\d{6,})$")
_PARTIAL = ".writing-"


class Saveable(Protocol):
    """A model with its optimizer, on every rank; see `learner.base.Learner`."""

    def snapshot(self) -> Snapshot: ...
    def load(self, folder: Path) -> None: ...


class CheckpointStore:
    """All ranks call all methods, at the same moments; rank 0 does the renaming and deleting.

    Args:
        warn: where to tell that a torn checkpoint was passed over.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, warn: Callable[[str], None] = print) -> None:
        self.folder = folder
        self._config = config
        self._warn = warn
        self._saving: Saving | None = None
        self._buffers: dict[str, HostBuffer] = {}  # by part; free while no save is under way

    def latest(self) -> Path | None:
        """The newest checkpoint, by what `latest` says; its files are not looked at. Not collective.

        Raises:
            CheckpointError: `latest` names a folder that is not there.
        """
        candidates = self._candidates()
        if candidates is None:
            return None
        if not candidates or not (candidates[0] / STATE).is_file():
            raise CheckpointError(
                f"{self.folder / 'latest'} does not name a complete checkpoint; write the name of a complete folder in "
                f"{self.folder} into it, or delete it to start over"
            )
        return candidates[0]

    # saving

    def save(self, step: int, parts: Mapping[str, Saveable], state: dict[str, Any] | None) -> Path:
        """Save after `step` steps, waiting for the save before. Where it will be; asynchronously: not at once.

        Args:
            parts: models by the name of their folder.
            state: JSON, needed on rank 0 only; what it says now is saved.

        Raises:
            CheckpointError: on every rank, where one cannot write, also of the save before; the checkpoint before that
                stays the latest.
        """
        self._finish()
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f"{_PARTIAL}{final.name}"
        body = json.loads(json.dumps({"format": FORMAT, "step": step, **(state or {})}))  # a copy: training goes on
        snapshots = {name: part.snapshot() for name, part in parts.items()}
        if self._config.asynchronous:
            for name, snapshot in snapshots.items():
                snapshot.detach(self._buffers.setdefault(name, HostBuffer()))
        self._saving = Saving(partial, final, snapshots, body, self._config.timeout_s)
        self._prepare(partial, parts)
        self._saving.start()
        if not self._config.asynchronous:
            self._finish()
        return final

    def poll(self) -> None:
        """At a step boundary: complete the save under way, if all ranks have written their part.

        Raises:
            CheckpointError: see `save`.
        """
        if self._saving is not None and self._saving.has_ended():
            self._complete(self._saving)

    def close(self) -> None:
        """Complete the save under way, up to `checkpoint.timeout_s` after it began.

        Raises:
            CheckpointError: see `save`.
        """
        self._finish()

    def _finish(self) -> None:
        if self._saving is not None:
            self._saving.wait()
            self._complete(self._saving)

    def _prepare(self, partial: Path, parts: Mapping[str, Saveable]) -> None:
        complaint = None
        try:
            if rank_and_size()[0] == 0:
                for torn in self.folder.glob(f"{_PARTIAL}*"):  # an attempt was killed while it saved
                    remove(torn)
                for name in parts:
                    (partial / name).mkdir(parents=True)
        except OSError as error:
            complaint = str(error)
        self._raise_together(complaint)

    def _complete(self, saving: Saving) -> None:
        """Give the checkpoint its name, or take it away; on every rank the same."""
        self._raise_together(saving.complaint())
        manifests = gather_json(saving.manifests)
        complaint = None
        if rank_and_size()[0] == 0:
            try:
                saving.complete(manifests)
                self._publish(saving)
            except (OSError, CheckpointError) as error:
                complaint = str(error)
        self._raise_together(complaint)
        self._saving = None

    def _publish(self, saving: Saving) -> None:
        if saving.final.exists():  # later than what the run was resumed from
            old = self.folder / f"{_PARTIAL}{saving.final.name}.old"
            os.replace(saving.final, old)
            os.replace(saving.partial, saving.final)
            remove(old)
        else:
            os.replace(saving.partial, saving.final)
        flush(self.folder)
        replace_durably(self.folder / "latest", saving.final.name)
        self._delete_old(int(saving.final.name.removeprefix("step-")))

    def _raise_together(self, complaint: str | None) -> None:
        found = first_complaint(complaint)
        if found is None:
            return
        assert self._saving is not None
        saving, self._saving = self._saving, None
        self._buffers = {}  # a thread that is late may still read them
        if rank_and_size()[0] == 0:
            remove(saving.partial)  # it may be what has filled the disk
        raise CheckpointError(f"cannot save {saving.final}: {found}; the previous checkpoint is still the latest")

    def _delete_old(self, step: int) -> None:
        """Keep the newest up to `step`; later ones are there after a rewind of `latest`, and stay until rewritten."""
        for old in self._steps(step)[self._config.keep_last :]:
            remove(old)

    # resuming

    def resume(self, parts: Mapping[str, Saveable]) -> dict[str, Any] | None:
        """Restore the newest whole checkpoint; returns the state saved with it, or None where there is no `latest`.

        A torn one is told and passed over. All files are read and compared with their digests, each by one rank.

        Raises:
            CheckpointError: on every rank: none is whole; or one is of another format or model, or refused by a part.
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
            self._warn(f"warning: passing over {path.name}: {torn}")
        found = "; ".join(complaints) or "there is no folder step-N"
        raise CheckpointError(f"no checkpoint in {self.folder} is whole: {found}; remove {self.folder} to start over")

    @staticmethod
    def load(path: Path, parts: Mapping[str, Saveable]) -> dict[str, Any]:
        """Restore all parts without comparing digests; returns the state that was saved with them.

        Raises:
            CheckpointError: torn, of another format, or refused by a part.
        """
        state = _read_state(path)
        for name, part in parts.items():
            part.load(path / name)
        return state

    def _find_torn(self, path: Path, parts: Mapping[str, Saveable]) -> str | None:
        """What is torn, the same on every rank. Raises CheckpointError for what is whole, and yet cannot be used."""
        torn = unusable = None
        try:
            saved = _read_state(path).get("parts", {})  # none in a checkpoint of an earlier version
            for name in parts:
                index = read_index(path / name)
                if name in saved and digest_of(path / name / INDEX) != saved[name]["index"]:
                    raise TornCheckpointError(
                        f"{path / name / INDEX} is of another checkpoint, after {index.facts['version']} updates; "
                        f"{STATE} was saved with the one after {saved[name]['version']}"
                    )
                index.verify(*rank_and_size())
        except TornCheckpointError as error:
            torn = str(error)
        except CheckpointError as error:
            unusable = str(error)
        if (found := first_complaint(unusable)) is not None:
            raise CheckpointError(found)
        return first_complaint(torn)

    def _candidates(self) -> list[Path] | None:
        """What `latest` names, and older ones, the newest first; all, where it names none; None without `latest`."""
        pointer = self.folder / "latest"
        if not pointer.exists():
            return None
        named = _NAME.match(pointer.read_text(errors="replace").strip())
        if named is None:
            return self._steps()
        first = self.folder / named[0]
        return [first, *(path for path in self._steps(int(named[1])) if path != first)]

    def _steps(self, newest: int | None = None) -> list[Path]:
        """Checkpoint folders up to a step, the newest first."""
        steps = [int(m[1]) for p in self.folder.iterdir() if (m := _NAME.match(p.name))]
        return [self.folder / f"step-{n:06d}" for n in sorted(steps, reverse=True) if newest is None or n <= newest]


def _read_state(path: Path) -> dict[str, Any]:
    """Read state.json, which names the step of its own folder.

    Raises:
        TornCheckpointError: it is missing, not as it was written, or of another step.
        CheckpointError: it has another format.
    """
    state = read_sealed(path / STATE)
    named = _NAME.match(path.name)
    if named and int(named[1]) != state["step"]:
        raise TornCheckpointError(
            f"{path / STATE} is of step {state['step']}: another checkpoint's, or a renamed folder"
        )
    return state
