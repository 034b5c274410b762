"""Real runs that are slow, hang, or run out of memory, and what they tell. Ranks are forked (killable.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.processes import reserved_ports
from bapo_megatron.monitor.prometheus import prometheus_name
from bapo_megatron.resolved import resolve
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.steps import read_metrics
from tests.distributed import HANG_S, forkserver
from tests.integration.killable import Engine, small_run
from tests.unit.test_prometheus import scrape

STALL_S = 8
TOLD = "  warning: no progress: rank 1 in step "  # a busy machine may tell of rank 0 as well
SLOWER = 4  # by its clock, each pass takes the slow rank this many times what it takes the other


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.kill()


class Run:
    """The ranks of one attempt, each with its own fault. A context manager."""

    def __init__(self, config: Config, engine: Engine, fault: Callable[[int, Path], None]) -> None:
        self._lock = RunDir.open(config)
        self.path, self.log_dir = self._lock.path, self._lock.log_dir
        self.screen = self.path / "screen.txt"
        self._stack = contextlib.ExitStack()
        (port,) = self._stack.enter_context(reserved_ports(1))  # rank 0's store can still listen on it
        context = forkserver()
        size = config.parallel.size
        self.ranks: list[BaseProcess] = [
            context.Process(target=_rank, args=(rank, size, port, self.path, engine.url, fault), daemon=True)
            for rank in range(size)
        ]
        for rank in self.ranks:
            rank.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()
        self._stack.close()
        self._lock.close()

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            logs = "\n".join(log.read_text()[-3000:] for log in sorted(self.log_dir.glob("trainer-*.log")))
            assert all(rank.exitcode in (None, 0) for rank in self.ranks), logs
            assert time.monotonic() < deadline, f"waited until {what}\n{logs}"
            time.sleep(0.1)

    def rows(self) -> list[dict[str, float]]:
        return read_metrics(self.path / "metrics.jsonl")

    def stall(self, rank: int) -> str:
        """Return a rank's latest report; on a busy machine there may have been earlier ones."""
        report = self.log_dir / f"stall-{rank}.txt"
        return report.read_text() if report.exists() else ""

    def shown(self) -> str:
        return self.screen.read_text()


def _rank(rank: int, size: int, port: int, run_dir: Path, url: str, fault: Callable[[int, Path], None]) -> None:
    import torch

    from bapo_megatron import trainer

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    screen = os.open(run_dir / "screen.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(screen, 1)
    fault(rank, run_dir)
    raise SystemExit(trainer.main(["--run-dir", str(run_dir), "--engine-url", url]))


def slow_then_hung(rank: int, run_dir: Path) -> None:
    """Make rank 1 slower in every pass, by the ranks' clocks; it hangs in a pass once the file `hang` exists.

    These clocks count forward passes.
    """
    from bapo_megatron.config.load import load_config
    from bapo_megatron.learner.policy import PolicyModel
    from bapo_megatron.monitor import stall
    from bapo_megatron.runtime import straggler

    stall.TIMEOUT_SHARE = STALL_S / load_config([run_dir / "config.toml"]).parallel.timeout_s
    forward, spent_s = PolicyModel.forward, 0.0

    def counted(self: PolicyModel, *arguments: Any, **options: Any) -> Any:
        nonlocal spent_s
        if rank == 1 and (run_dir / "hang").exists():
            time.sleep(1e6)
        spent_s += float(SLOWER if rank == 1 else 1)
        return forward(self, *arguments, **options)

    PolicyModel.forward = counted  # type: ignore[method-assign]
    straggler.time = types.SimpleNamespace(monotonic=lambda: spent_s)  # type: ignore[assignment]


@pytest.mark.slow
def test_a_run_tells_its_numbers_its_slow_rank_and_where_it_hangs(engine: Engine, tmp_path: Path) -> None:
    settings = (
        "train.num_steps=1000",
        "parallel.tensor=1",
        "parallel.data=2",
        "eval.interval_steps=1",
        "eval.num_prompts=2",
        "checkpoint.interval_steps=1000",
        'monitor.sinks=["tensorboard"]',
        "monitor.prometheus_port=0",
    )
    with Run(small_run(tmp_path, "run", *settings), engine, slow_then_hung) as run:
        run.wait(lambda: len(run.rows()) >= 4, "four steps are trained")
        _check_slow_rank(run)
        _check_scrape(run)
        (run.path / "hang").touch()
        run.wait(lambda: "time.sleep(1e6" in run.stall(1), "rank 1 reports")
        run.wait(lambda: "in all_to_all_single" in run.stall(0), "rank 0 reports")
        run.wait(lambda: TOLD in run.shown(), "rank 0 tells")
        _check_stall(run)
    tensorboard = list((run.path / "tensorboard").glob("events.out.tfevents.*"))
    assert len(tensorboard) == 1


def _check_slow_rank(run: Run) -> None:
    run.wait(lambda: "warning: trainer rank 1 is slow" in run.shown(), "the user is warned")
    slow = [row for row in run.rows() if row["straggler/rank"] == 1 and row["straggler/ratio"] > 1.5]
    assert len(slow) >= 3
    for row in slow:
        assert row["straggler/ratio"] == pytest.approx(row["straggler/slowest_s"] / row["straggler/median_s"])
        assert row["straggler/ratio"] > SLOWER / 2


def engine_versions(found: dict[str, float]) -> list[float]:
    return [value for name, value in found.items() if name.startswith("bapo_engine_weight_version")]


def engines_up(found: dict[str, float]) -> list[float]:
    return [value for name, value in found.items() if name.startswith("bapo_engine_up")]


def _check_scrape(run: Run) -> None:
    (url,) = re.findall(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", run.shown())
    scrapes: list[dict[str, float]] = []

    def tells_of_an_engine_after_a_push() -> bool:
        scrapes.append(scrape(url))
        return engines_up(scrapes[-1]) == [1] and engine_versions(scrapes[-1]) > [0]

    run.wait(tells_of_an_engine_after_a_push, "the engine has answered, after a push")
    found = scrapes[-1]
    assert found['bapo_step{run="run"}'] >= 4
    assert found['bapo_steps_total{run="run"}'] == found['bapo_step{run="run"}']
    assert len(engine_versions(found)) == 1
    exported = {name.split("{")[0] for name in found}
    earlier = set(run.rows()[2])
    assert {prometheus_name(name) for name in earlier} <= exported


def _check_stall(run: Run) -> None:
    waiting, hung = run.stall(0), run.stall(1)
    assert re.search(r"^step \d+, (score|train): at ", hung.splitlines()[1])
    collective = "in all_to_all_single, called by kernels/cpu"
    assert re.search(rf"^step \d+, (score|train): {collective}", waiting.splitlines()[1])
    assert "trainer: forward step 1 of" in hung
    assert "of the rollout loop" in waiting
    told = [line for line in run.shown().splitlines() if TOLD in line][-1]
    assert told.endswith(f"see {run.log_dir}/stall-<rank>.txt")


def no_memory_for_adam(rank: int, run_dir: Path) -> None:
    import torch

    from bapo_megatron.learner.split_model import TrainedModel

    def optimizer_step(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    TrainedModel.optimizer_step = optimizer_step  # type: ignore[method-assign]


def test_running_out_of_memory_is_one_clear_error(engine: Engine, tmp_path: Path) -> None:
    config = small_run(tmp_path, "run", "train.num_steps=2", "parallel.tensor=1")
    with Run(config, engine, no_memory_for_adam) as run:
        (rank,) = run.ranks
        rank.join(HANG_S)
        assert rank.exitcode == 2
    lines = (run.log_dir / "error-0.txt").read_text().splitlines()
    assert lines[0] == (
        "trainer rank 0 ran out of memory in training (the optimizer step), step 1: "
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert re.match(r"in use: \d+\.\d+ GiB by this process", lines[1])
    assert re.match(r"planned for this rank: weights \d.* MiB, gradients .*; peak ", lines[2])
    suggestions = [line for line in lines if line.startswith("try ")]
    assert suggestions
    log = (run.log_dir / "trainer-0.log").read_text()
    assert "Traceback" in log
    assert "torch.OutOfMemoryError" in log or "torch.cuda.OutOfMemoryError" in log


def _out_of_memory(folder: Path) -> None:
    """Raise errors where the learner catches them, and a real one; this runs in a process of its own."""
    import torch

    from bapo_megatron.assets import demo_model_path
    from bapo_megatron.buffer.packing import one_minibatch
    from bapo_megatron.config.load import load_config
    from bapo_megatron.errors import OutOfMemoryError
    from bapo_megatron.learner import megatron
    from bapo_megatron.learner.megatron import MegatronLearner
    from bapo_megatron.learner.parallel import stop_processes
    from bapo_megatron.learner.policy import PolicyModel
    from bapo_megatron.preflight.oom import explaining_out_of_memory
    from bapo_megatron.runtime.heartbeat import Heartbeat
    from bapo_megatron.runtime.stopwatch import Stopwatch
    from bapo_megatron.types import ClipBounds
    from tests.integration.learner_reference import random_batch

    config = load_config(["demo"], ["parallel.tensor=1", f"parallel.timeout_s={HANG_S}"])
    run = resolve(config, demo_model_path())
    found: dict[str, str] = {}
    heartbeat = Heartbeat()
    watch = Stopwatch(heartbeat)

    def explained(name: str, body: Callable[[], object]) -> None:
        try:
            with explaining_out_of_memory(run, 0, heartbeat):
                body()
        except OutOfMemoryError as error:
            found[name] = str(error)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def build() -> None:
        megatron.PolicyModel, real = fail, megatron.PolicyModel  # type: ignore[assignment,misc]
        try:
            MegatronLearner(resolve(config, demo_model_path()))
        finally:
            megatron.PolicyModel = real  # type: ignore[misc]

    explained("building", build)
    stop_processes()
    learner = MegatronLearner(resolve(config, demo_model_path()))
    batch = random_batch()
    batch = replace(batch, token_ids_T=batch.token_ids_T % learner.shape.vocab_size)
    minibatch = one_minibatch(batch, max_tokens=200, share=learner.share)
    bounds = ClipBounds(0.8, 1.2, 0.5, False, 0)

    def in_span(span: str, body: Callable[[], object]) -> None:
        watch.begin(2)
        heartbeat.span = None
        with watch.span(span):
            body()

    forward = PolicyModel.forward
    PolicyModel.forward = fail  # type: ignore[method-assign,assignment]
    explained("score", lambda: in_span("score", lambda: learner.log_probs(minibatch)))
    explained("forward", lambda: in_span("train", lambda: learner.step(minibatch, bounds)))
    PolicyModel.forward = forward  # type: ignore[method-assign]

    def failing_backward(self: PolicyModel, *arguments: Any, **options: Any) -> Any:
        scores = forward(self, *arguments, **options)
        scores[0].register_hook(fail)
        return scores

    PolicyModel.forward = failing_backward  # type: ignore[method-assign]
    explained("backward", lambda: in_span("train", lambda: learner.step(minibatch, bounds)))
    PolicyModel.forward = forward  # type: ignore[method-assign]
    explained("sync", lambda: in_span("sync", fail))
    heartbeat.span = None
    with mock.patch.object(learner.adam, "writers", fail):
        explained("snapshot", learner.snapshot)

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    explained("torch", lambda: in_span("critic", lambda: torch.empty(2**31, dtype=torch.uint8)))
    explained("python", lambda: in_span("rollout", lambda: bytearray(2**31)))
    (folder / "found.json").write_text(json.dumps(found))


def test_every_part_that_runs_out_of_memory_is_named(tmp_path: Path) -> None:
    process = forkserver().Process(target=_out_of_memory, args=(tmp_path,), daemon=True)
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    parts = {name: text.splitlines()[0].split(" memory in ")[1].split(": ")[0] for name, text in found.items()}
    assert parts == {
        "building": "building the model, before the first step",
        "score": "scoring (a forward pass), step 3",
        "forward": "training (a forward pass), step 3",
        "backward": "training (a backward pass), step 3",
        "sync": "the weight sync, step 3",
        "snapshot": "saving a checkpoint, after step 3",
        "torch": "the critic, step 3",
        "python": "taking a batch, step 3",
    }
    assert "DefaultCPUAllocator" in found["torch"].splitlines()[0]
    assert "its address space is limited to" in found["torch"]
