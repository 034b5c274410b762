"""kill -9 of the trainer at seeded moments, and what the resumed run has in common with an undisturbed one.

Synchronous mode: everything, bit for bit. Overlapped mode: no token is lost, no sample is trained twice.
"""

import contextlib
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Set
from pathlib import Path

import psutil
import pytest
import torch
from make_demo_model import SIZES, VOCABULARY
from warm_start import build_model, build_tokenizer, save

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.rollout.book import groups_of
from bapo_megatron.rollout.group_files import group_from_json
from bapo_megatron.rollout.ledger import Ledger
from bapo_megatron.runtime.files import read_jsonl
from bapo_megatron.types import Sample
from tests.distributed import HANG_S
from tests.integration.gates import Gates
from tests.integration.killable import (
    SMALL,
    Attempt,
    Engine,
    Moment,
    checkpoint_of,
    metrics_of,
    repeated,
    small_run,
    surviving,
)
from tests.integration.sick_runs import COIN

NUM_STEPS = 8


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an undisturbed run; training waits for each of its saves."""
    folder = tmp_path_factory.mktemp("reference")
    engine = Engine(folder / "engine")
    try:
        with Attempt(small_run(folder, "alone", f"train.num_steps={NUM_STEPS}"), engine) as attempt:
            attempt.finish()
            return attempt.run_dir
    finally:
        engine.kill()


def kill_and_resume(
    folder: Path,
    settings: tuple[str, ...],
    *,
    num_kills: int,
    seed: int,
    step_s: float,
    new_engine: Callable[[Path], Engine] = Engine,
) -> list[Path]:
    """Return runs that were killed `num_kills` times in all, each resumed until it was done.

    Half of the kills leave the engine alive; it may be paused with half of its weights. The next attempt must then
    make it work again.
    """
    rng = random.Random(seed)
    kinds = [("anywhere", "save", "push", "anywhere")[i % 4] for i in range(num_kills)]
    rng.shuffle(kinds)
    runs: list[Path] = []
    numbers = itertools.count()
    engine = new_engine(folder / "engine")
    try:
        while kinds:
            config = small_run(folder, f"killed-{len(runs)}", *settings)
            is_done = False
            while not is_done:
                moment = Moment.draw(kinds[-1], rng, step_s) if kinds else None
                gates = Gates(folder / f"gates-{next(numbers)}", *([moment.place] if moment else []))
                with Attempt(config, engine, gates) as attempt:
                    is_done = moment is None or not moment.kill(attempt)
                    attempt.finish() if is_done else print("killed:", kinds.pop(), moment, "after", attempt.progress())
                if not is_done and rng.random() < 0.5:
                    engine.kill()
                    engine = new_engine(folder / "engine")
            runs.append(attempt.run_dir)
    finally:
        engine.kill()
    num_resumed = sum(len(list((run / "logs").glob("attempt-*"))) - 1 for run in runs)
    # A run that was killed after its last checkpoint is finished, so it has no further attempt.
    assert num_kills - len(runs) <= num_resumed <= num_kills
    return runs


def longest_step_s(run: Path) -> float:
    return max(row["time/step_s"] for row in read_jsonl(run / "metrics.jsonl"))


def assert_same(run: Path, reference: Path, num_steps: int) -> None:
    """Check that a run equals the reference bit for bit."""
    assert metrics_of(run) == metrics_of(reference)[:num_steps]
    samples = [s for s in read_jsonl(reference / "samples.jsonl") if s["step"] <= num_steps]
    assert read_jsonl(run / "samples.jsonl") == samples
    assert len(samples) == num_steps * 16
    for step in range(1, num_steps + 1):
        assert checkpoint_of(run, step) == checkpoint_of(reference, step), f"step {step}"


@pytest.mark.slow
def test_a_synchronous_run_is_repeated_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    runs = []
    for seed, asynchronous in enumerate(("false", "true")):
        settings = (f"train.num_steps={NUM_STEPS}", f"checkpoint.asynchronous={asynchronous}")
        folder = tmp_path / asynchronous
        runs += kill_and_resume(folder, settings, num_kills=3, seed=seed, step_s=longest_step_s(reference))
    for run in runs:
        assert_same(run, reference, NUM_STEPS)
        # Batches (tokens, log-probs) and bounds, including those that an attempt lost and the next one computed again.
        for key in ("step", "update"):
            expected = surviving(reference, key)
            assert surviving(run, key).keys() == expected.keys()
            for number, entries in repeated(run, key).items():
                assert all(entry == expected[number] for entry in entries), f"{run.name}, {key} {number}"


SHARED_OUT = ("parallel.tensor=1", "parallel.data=2", "parallel.expert=2")
EXPERTS = ("model.path=moe", *SHARED_OUT)
CENTERED = ("lora.rank=8", "loss.name=cispo", "loss.center_top_k=8", "train.share_prompts=true", "train.deal=groups")
SOURCES = 'data.sources=[{name="a",source="chains"},{name="b",source="chains",weight=2}]'
BY_SOURCE = 'teacher.path_by_source={a="study",b="hybrid"}'
TAUGHT = ("advantage.kind=teacher", SOURCES, BY_SOURCE, "reward.kind=none", "bapo.scope=fixed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "seed"), [("moe", EXPERTS, 86), ("demo", CENTERED, 52), ("demo", TAUGHT, 17)]
)
def test_experts_that_ranks_share_out_centered_adapters_and_teachers_are_repeated_bit_for_bit(
    tmp_path: Path, model: str, settings: tuple[str, ...], seed: int
) -> None:
    check_repeated(tmp_path, shipped_model_path(model), settings, seed, num_kills=3)


@pytest.mark.slow
def test_linear_attention_with_experts_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    """An untrained model, which a judge rewards by chance."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(VOCABULARY)
    save(build_model(tokenizer, **SIZES["hybrid-moe"]), tokenizer, tmp_path / "model")
    settings = (f"model.path={tmp_path / 'model'}", *SHARED_OUT, "model.replay_routes=true", COIN)
    check_repeated(tmp_path, tmp_path / "model", settings, seed=31, num_kills=3)


def check_repeated(tmp_path: Path, model: Path, settings: tuple[str, ...], seed: int, *, num_kills: int) -> None:
    """Compare four steps of a run that is left alone with runs that are killed."""

    def new_engine(folder: Path) -> Engine:
        return Engine(folder, "--model-path", str(model))

    settings = (*settings, "train.num_steps=4")
    engine = new_engine(tmp_path / "engine")
    try:
        with Attempt(small_run(tmp_path, "alone", *settings), engine) as attempt:
            attempt.finish()
    finally:
        engine.kill()
    alone, step_s = attempt.run_dir, longest_step_s(attempt.run_dir)
    killed = tmp_path / "killed"
    for run in kill_and_resume(killed, settings, num_kills=num_kills, seed=seed, step_s=step_s, new_engine=new_engine):
        assert_same(run, alone, 4)


@pytest.mark.slow
def test_the_same_command_goes_on_after_everything_was_killed(reference: Path, tmp_path: Path) -> None:
    """As when a cluster job ends: launcher, ranks and engine die together in the second step."""
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={tmp_path}", "run.name=killed"]
    command += [*SMALL, "train.num_steps=3"]
    gates = Gates(tmp_path / "gates", 2)
    with (tmp_path / "output").open("wb") as output:
        environment = os.environ | gates.environment
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        started: list[psutil.Process] = []
        try:
            gates.wait(2, lambda: run.poll() is None, (tmp_path / "output").read_text)
            started = psutil.Process(run.pid).children(recursive=True)
        finally:
            run.kill()
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with the launcher
                    process.kill()
            run.wait()
    assert len(read_jsonl(tmp_path / "killed" / "metrics.jsonl")) == 1
    again = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming" in again.stdout
    assert_same(tmp_path / "killed", reference, 3)


@pytest.mark.slow
def test_an_overlapped_run_loses_nothing_and_trains_nothing_twice(reference: Path, tmp_path: Path) -> None:
    settings = ("rollout.overlap=true", "rollout.max_staleness=5", "parallel.tensor=1", "train.num_steps=10")
    step_s = longest_step_s(reference)
    for run in kill_and_resume(tmp_path, settings, num_kills=3, seed=2, step_s=step_s):
        assert_nothing_lost(run, num_steps=10, max_staleness=5)


def assert_nothing_lost(run: Path, *, num_steps: int, max_staleness: int) -> None:
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert max(row["staleness/max"] for row in rows) <= max_staleness
    trained: dict[str, Sample] = {}
    seen: dict[str, Sample] = {}  # samples in the buffer at the checkpoint before
    for step in range(1, num_steps + 1):
        batch = surviving(run, "step")[step]
        now = [t for g in batch["groups"] for t in group_from_json(g).samples]
        assert not trained.keys() & {t.sample_id for t in now}, "trained twice"
        assert all(
            batch["version"] - t.oldest_version + 1 <= max_staleness for t in now if t.oldest_version is not None
        )
        for t in now:
            assert_grown(seen.get(t.sample_id), t)
        trained |= {t.sample_id: t for t in now}
        seen = buffered_in(run, step, trained.keys())
        assert seen, "sampling continues while the trainer trains"


def buffered_in(run: Path, step: int, trained: Set[str]) -> dict[str, Sample]:
    """Return what a checkpoint holds, after checking its books: admitted = trained + buffered, none dropped."""
    state = CheckpointStore.load(run / "checkpoints" / f"step-{step:06d}", {})["rollout"]
    held = {t.sample_id: t for groups in groups_of(state, ()) for g in groups for t in g.samples}
    ledger = Ledger()
    ledger.load_state_dict(state["ledger"])
    ledger.check(held.values())
    assert not ledger.dropped
    assert ledger.num_samples["trained"] == len(trained)
    admitted = {f"{prompt_id}.{i}" for prompt_id in range(state["prompts"]["next_id"]) for i in range(4)}
    assert admitted == held.keys() | trained, "lost"
    assert not held.keys() & trained, "trained and kept"
    return held


def assert_grown(before: Sample | None, after: Sample) -> None:
    """Check that sampled tokens are unchanged."""
    if before is not None:
        n = before.num_sampled_tokens
        assert tuple(after.sampled_ids[:n]) == tuple(before.sampled_ids)
        assert tuple(after.behaviour_logprobs[:n]) == tuple(before.behaviour_logprobs)
        assert tuple(after.versions[:n]) == tuple(before.versions)
