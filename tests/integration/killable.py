"""Runs that are killed often: ranks and engine are forked from a server that has done the imports, not started anew.

The ranks run the trainer's own entry point, as `bapo train` starts it. Rank 0 also keeps a journal of the inputs of
losses and checkpoints: every batch that was handed out, every update's bounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bapo_megatron.assets import demo_model_path
from bapo_megatron.checkpoint.folder import DIGEST_FIELD
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.processes import reserved_ports
from bapo_megatron.rollout.group_files import group_to_json
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl
from bapo_megatron.tokens import encoded_rows
from bapo_megatron.types import ClipBounds, MiniBatch
from tests.distributed import HANG_S, forkserver
from tests.hang import PATIENT
from tests.integration.gates import Gates, build

_POLL_S = 0.004
# Times, and counts since an attempt began.
NOT_COMPARED = (
    "time/",
    "straggler/",
    "sync/",
    "turns/",
    "train/tokens_per_s",
    "perf/tflops_per_gpu",
    "perf/mfu",
    "rollout/tokens_per_s",
    "rollout/num_fenced",
    "reward/",
    "environment/wait_s",
    "run/",
)
COMPARED_ALL_THE_SAME = ("reward/mean", "reward/std", "sync/bytes")
_SAVE, _PUSH = 30, 60  # one save and one push each have about this many gates


class Engine:
    """An embedded engine with the demo model, in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        self.process: BaseProcess = forkserver().Process(
            target=_serve, args=(ready, folder / "engine.log", arguments), daemon=True
        )
        self.process.start()
        _wait(ready.exists, self.process, "the engine started")
        self.url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Attempt:
    """One attempt of a run: all its ranks, which can be frozen, resumed and killed. A context manager."""

    def __init__(
        self, config: Config, engine: Engine, gates: Gates | None = None, prepare: Callable[[], None] | None = None
    ) -> None:
        """Start the ranks; each calls `prepare` before it begins."""
        self.engine, self.gates = engine, gates
        self._lock = RunDir.open(config)
        self.run_dir = self._lock.path
        self.first_step = _latest_step(self.run_dir)
        self._stack = contextlib.ExitStack()
        (port,) = self._stack.enter_context(reserved_ports(1))  # rank 0's store can still listen on it
        self._journal = self.run_dir / "journal" / f"attempt-{self._lock.attempt:03d}.jsonl"
        size = config.parallel.size
        self.ranks: list[BaseProcess] = [
            forkserver().Process(
                target=_train,
                args=(
                    *(rank, size, port, self.run_dir, engine.url, self._journal),
                    gates.environment if gates else {},
                    prepare,
                ),
                daemon=True,
            )
            for rank in range(size)
        ]
        for rank in self.ranks:
            rank.start()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._stack.close()
        self._lock.close()

    def has_ended(self) -> bool:
        """Return whether all ranks have ended; fail if one has ended badly."""
        codes = [rank.exitcode for rank in self.ranks]
        assert all(code in (None, 0) for code in codes), f"exit codes {codes}: {self.complaints()}"
        return None not in codes

    def finish(self) -> None:
        deadline = time.monotonic() + HANG_S
        while not self.has_ended():
            assert time.monotonic() < deadline, f"{self.run_dir.name} did not end"
            time.sleep(0.05)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def kill_at_gate(self, place: int | str) -> bool:
        """Kill all ranks when one of them reaches a gate; return False if the run ended before that."""
        gates = self.gates
        assert gates is not None
        return self.kill_when(lambda: gates.is_reached(place))

    def kill_when(self, condition: Callable[[], bool]) -> bool:
        """Kill all ranks once a condition holds; return False if the run ended before that."""
        deadline = time.monotonic() + HANG_S
        while not condition():
            if self.has_ended():
                return False
            assert time.monotonic() < deadline, f"waited for the moment to kill {self.run_dir.name}"
            time.sleep(_POLL_S)
        self.kill()
        return True

    def has_begun(self) -> bool:
        """Return whether the attempt's first batch has been handed out."""
        return self._journal.exists() and self._journal.stat().st_size > 0

    def num_done(self) -> int:
        """Return how many steps this attempt has saved."""
        return _latest_step(self.run_dir) - self.first_step

    def progress(self) -> str:
        """Describe the attempt for the test's output."""
        return f"{self.num_done()} steps of attempt {self._lock.attempt}, which began at step {self.first_step}"

    def errors(self) -> str:
        """Return the errors that the ranks leave for the user."""
        return "\n".join(path.read_text() for path in sorted(self._lock.log_dir.glob("error-*.txt")))

    def complaints(self) -> str:
        logs = sorted(self._lock.log_dir.glob("trainer-*.log"))
        return "\n".join(log.read_text()[-2000:] for log in logs)


SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.groups_in_flight=6",
    "rollout.engine_threads=1",
    "train.minibatches_per_step=2",
    "parallel.threads_per_rank=1",
    "sync.bucket_mib=0.5",
    *PATIENT,
    "checkpoint.interval_steps=1",
    "checkpoint.keep_last=1000",
    "monitor.samples_per_step=1000",
    "monitor.progress=lines",
)
"""The demo with few prompts; saves after every step, and keeps all checkpoints."""


def small_run(folder: Path, name: str, *settings: str) -> Config:
    return load_config(["demo"], [f"run.dir={folder}", f"run.name={name}", *SMALL, *settings])


@dataclass
class Moment:
    """A random moment to kill a run: inside a save, inside a push, or anywhere within a few steps."""

    place: str  # the closed gate
    delay_s: float | None = None  # after the first batch, unless the run reaches the gate first

    @classmethod
    def draw(cls, kind: str, rng: random.Random, step_s: float) -> Moment:
        match kind:
            case "save":
                return cls(f"save-{rng.randint(1, 2 * _SAVE)}")
            case "push":
                return cls(f"push-{rng.randint(1, 2 * _PUSH)}")
        return cls("end", rng.uniform(0.0, 2.5 * step_s))

    def kill(self, attempt: Attempt) -> bool:
        """Kill the run; return False if it ended before that."""
        if (delay_s := self.delay_s) is None:
            return attempt.kill_at_gate(self.place)
        began: list[float] = []

        def is_time() -> bool:
            if not began and attempt.has_begun():
                began.append(time.monotonic())
            assert attempt.gates is not None
            return attempt.gates.is_reached(self.place) or (bool(began) and time.monotonic() > began[0] + delay_s)

        return attempt.kill_when(is_time)


def surviving(run_dir: Path, key: str) -> dict[int, dict[str, Any]]:
    """Return journal entries with `key`, by step or version; if several attempts got there, the last one counts."""
    journals = sorted((run_dir / "journal").glob("attempt-*.jsonl"))
    return {entry[key]: entry for journal in journals for entry in read_jsonl(journal) if key in entry}


def repeated(run_dir: Path, key: str) -> dict[int, list[dict[str, Any]]]:
    """Return the journal entries with `key` of all attempts, by step or version."""
    found: dict[int, list[dict[str, Any]]] = {}
    for journal in sorted((run_dir / "journal").glob("attempt-*.jsonl")):
        for entry in read_jsonl(journal):
            if key in entry:
                found.setdefault(entry[key], []).append(entry)
    return found


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics that were computed."""
    return [
        {k: v for k, v in row.items() if k in COMPARED_ALL_THE_SAME or not k.startswith(NOT_COMPARED)}
        for row in read_jsonl(run / "metrics.jsonl")
    ]


def checkpoint_of(run: Path, step: int) -> dict[str, Any]:
    """Return weights, both moments, version, rollout state and lagged bounds, without the run's id and the digest."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    found = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.safetensors")}
    assert found
    texts = {name: json.loads((folder / name).read_text()) for name in ("state.json", "learner/index.json")}
    for name in ("run", DIGEST_FIELD):
        del texts["state.json"][name]
    return found | texts


def _latest_step(run_dir: Path) -> int:
    latest = run_dir / "checkpoints" / "latest"
    return int(latest.read_text().removeprefix("step-")) if latest.exists() else 0


def _wait(condition: Callable[[], bool], process: BaseProcess, what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert process.exitcode is None, f"{process.name} ended with exit code {process.exitcode} before {what}"
        assert time.monotonic() < deadline, f"waited until {what}"
        time.sleep(0.02)


# in the forked processes


def _serve(ready: Path, log: Path, of_test: Sequence[str]) -> None:
    from bapo_megatron.engines.embedded.server import main

    _write_to(log)
    arguments = ["--model-path", str(demo_model_path()), "--max-context", "64", "--max-running", "64"]
    main([*arguments, "--update-timeout-s", str(HANG_S), "--ready-file", str(ready), *of_test])


def _train(
    rank: int,
    size: int,
    port: int,
    run_dir: Path,
    url: str,
    journal: Path,
    of_gates: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    import torch

    from bapo_megatron import trainer

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), **address}
    torch.set_num_threads(1)
    _write_to(Path(os.devnull))
    if rank == 0:
        _keep_journal(journal)
    if of_gates:
        os.environ |= of_gates
        build()
    if prepare:
        prepare()
    raise SystemExit(trainer.main(["--run-dir", str(run_dir), "--engine-url", url]))


def _write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _keep_journal(path: Path) -> None:
    """Record every batch before it is trained, and the bounds of every update."""
    from bapo_megatron.learner.bounds import BoundsFinder
    from bapo_megatron.rollout.manager import RolloutManager

    journal = JsonlWriter(path)
    next_batch, find = RolloutManager.next_batch, BoundsFinder.find

    def keep_batch(self: RolloutManager, step: int, version: int) -> Any:
        made = next_batch(self, step, version)
        if made is not None:
            groups = json.loads(json.dumps([group_to_json(g) for g in made[1]], default=encoded_rows))
            journal.write({"step": step + 1, "version": version, "groups": groups})
        return made

    def keep_bounds(self: BoundsFinder, minibatch: MiniBatch) -> ClipBounds:
        bounds = find(self, minibatch)
        journal.write({"update": self._learner.version, **asdict(bounds)})
        return bounds

    RolloutManager.next_batch, BoundsFinder.find = keep_batch, keep_bounds  # type: ignore[method-assign]
