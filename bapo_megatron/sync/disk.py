"""Weights as files: the trainer writes a Hugging Face checkpoint that every engine loads, if no group can be formed.

    write <folder>/v-N (renamed into place) -> pause -> load -> verify -> continue -> older versions removed

Trainer and engines must share the folder. An engine that fails is fenced off; the others are not affected.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from bapo_megatron.config.schema import SyncConfig
from bapo_megatron.engines.base import Folder, PauseMode
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.wire import TensorSpec, digest, in_order
from bapo_megatron.errors import NoEngineLeftError
from bapo_megatron.hf.writer import copy_companions, write_safetensors
from bapo_megatron.sync.base import Sender, Submit, SyncStats
from bapo_megatron.sync.session import Session


class DiskChannel(Sender):
    """Implements `Sender`."""

    def __init__(
        self,
        pool: EnginePool,
        config: SyncConfig,
        submit: Submit,
        *,
        folder: Path,
        hf_path: Path,
        pause_mode: PauseMode = "retract",
    ) -> None:
        """Write versions below `folder`; copy config and tokenizer, which SGLang also reads, from `hf_path`."""
        self._session = Session(pool, submit, config.timeout_s, pause_mode, {"disk"})
        self._folder = folder.absolute()
        self._hf_path = hf_path

    def connect(self, manifest: Sequence[TensorSpec]) -> None:
        """See `Sender.connect`."""
        self._session.connect(manifest)
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a dead trainer
        self._folder.mkdir(parents=True)

    def send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        """See `Sender.send`. It is never incomplete, because no engine's failure affects another."""
        try:
            return self._send(in_order(weights, self._session.manifest), version)
        except NoEngineLeftError:
            return self._session.abandon()

    def resume(self, stats: SyncStats) -> None:
        """See `Sender.resume`."""
        self._session.resume(stats)

    def close(self) -> None:
        """Keep the last version: an engine may be loading it."""

    def _send(self, weights: Iterator[tuple[str, Tensor]], version: int) -> SyncStats:
        stats = SyncStats(num_tensors=len(self._session.manifest), num_buckets=1)
        stats.num_bytes = sum(spec.num_bytes for spec in self._session.manifest)
        folder = self._folder / f"v-{version}"
        digests = self._write(weights, folder)
        stats.lap("gather")
        members, _, _ = self._session.pause(version)
        stats.lap("pause")
        keeps_cache = self._session.keeps_cache
        members.all(
            "load the weights",
            lambda engine: engine.transport.take(Folder(folder), version=version, keeps_cache=keeps_cache),
        )
        stats.lap("broadcast")
        self._session.verify(members, digests, version, stats)
        for other in self._folder.iterdir():
            if other != folder:
                shutil.rmtree(other)
        return stats

    def _write(self, weights: Iterator[tuple[str, Tensor]], folder: Path) -> dict[str, str]:
        """Write one version, completely or not at all; return the digest of each weight."""
        partial = folder.with_name(f"{folder.name}.partial")
        for old in (partial, folder):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        digests: dict[str, str] = {}

        def digested() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                digests[name] = digest(tensor)
                yield name, tensor

        copy_companions(self._hf_path, partial, write_safetensors(digested(), partial))
        os.replace(partial, folder)
        return digests
