"""Checkpoints of a whole run: learner, rollout state and counters, saved together and atomically.

checkpoints/step-000020/{learner/, state.json}     a folder appears only when it is complete
checkpoints/latest                                  the name of the newest complete one
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.base import Learner

_NAME = re.compile(r"^step-(\d{6,})$")
_PARTIAL = ".writing-"
_FORMAT = 1


class CheckpointStore:
    """All ranks call `save` and `load`; rank 0 does the renaming and deleting."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self._keep_last = keep_last

    def latest(self) -> Path | None:
        """The newest complete checkpoint.

        Raises:
            CheckpointError: `latest` names a folder that is not there.
        """
        pointer = self.folder / "latest"
        if not pointer.exists():
            return None
        path = self.folder / pointer.read_text().strip()
        if not (path / "state.json").is_file():
            raise CheckpointError(
                f"{pointer} names {path.name}, which is not a complete checkpoint; write the name of a complete "
                f"folder in {self.folder} into it, or delete it to start over"
            )
        return path

    def save(self, step: int, learner: Learner, state: dict[str, Any] | None) -> Path:
        """Save after `step` steps. `state` is a JSON value, needed on rank 0 only.

        Raises:
            CheckpointError: the disk is full or not writable; the previous checkpoint stays the latest.
        """
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f"{_PARTIAL}{final.name}"
        try:
            if _rank() == 0:
                for torn in self.folder.glob(f"{_PARTIAL}*"):  # an attempt was killed while it saved
                    shutil.rmtree(torn, ignore_errors=True)
                (partial / "learner").mkdir(parents=True)
            _barrier()
            learner.save(partial / "learner")
            _barrier()
            if _rank() == 0:
                (partial / "state.json").write_text(json.dumps({"format": _FORMAT, "step": step, **(state or {})}))
                _flush(partial)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
                _write_atomically(self.folder / "latest", final.name)
                self._delete_old(step)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what has filled the disk
            raise CheckpointError(
                f"cannot save {final}: {error}; the previous checkpoint is still the latest"
            ) from error
        _barrier()
        return final

    @staticmethod
    def load(path: Path, learner: Learner) -> dict[str, Any]:
        """Restore the learner; returns the saved state.

        Raises:
            CheckpointError: torn, of another format, or refused by the learner.
        """
        try:
            state = json.loads((path / "state.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(
                f"{path / 'state.json'} cannot be read ({error}); remove {path} to use an older one"
            ) from error
        if state.get("format") != _FORMAT:
            raise CheckpointError(f"{path} has format {state.get('format')}, this version reads {_FORMAT}")
        learner.load(path / "learner")
        return state

    def _delete_old(self, step: int) -> None:
        """Keep the newest up to `step`; later ones are there after a rewind of `latest`, and stay until rewritten."""
        steps = sorted(int(m[1]) for p in self.folder.iterdir() if (m := _NAME.match(p.name)) and int(m[1]) <= step)
        for old in steps[: -self._keep_last]:
            shutil.rmtree(self.folder / f"step-{old:06d}")


def _flush(folder: Path) -> None:
    """Bring all files to the disk: a name must not get there before what it stands for."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
