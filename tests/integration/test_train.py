"""The whole loop, started as a user starts it: real engine process, real ranks, real Megatron-Core."""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bapo_megatron.metrics import METRICS
from bapo_megatron.runs.steps import read_metrics
from tests.distributed import HANG_S
from tests.integration import forked
from tests.integration.forked import SMALL
from tests.integration.killable import Engine

SAME = ("loss/policy", "loss/entropy", "bapo/low", "bapo/high", "optimizer/grad_norm", "reward/mean", "staleness/mean")


def bapo(*arguments: str, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bapo_megatron", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        check=False,
    )


def train(folder: Path, name: str, *settings: str) -> list[dict[str, float]]:
    done = bapo("train", "demo", *SMALL, f"run.dir={folder}", f"run.name={name}", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(folder / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("runs")
    settings = ("train.num_steps=4", "parallel.tensor=1", "checkpoint.interval_steps=2")
    return folder, train(folder, "single", *settings)


@pytest.fixture(scope="module")
def one_rank(forked_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return forked.train(forked_engine, tmp_path_factory.mktemp("one"), "rank", "train.num_steps=3", "parallel.tensor=1")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("parallel.tensor=2", "parallel.pipeline=2"), id="tp2-pp2"),
        pytest.param(
            ("parallel.tensor=1", "parallel.data=2", "train.max_tokens_per_microbatch=200"),
            id="dp2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("parallel.tensor=1", "parallel.context=2", "optimizer.distributed=true"),
            id="cp2-distributed-optimizer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_layout_trains_like_a_single_process(
    forked_engine: Engine, one_rank: list[dict[str, float]], tmp_path: Path, layout: tuple[str, ...]
) -> None:
    rows = forked.train(forked_engine, tmp_path, "layout", "train.num_steps=3", *layout)
    for row, expected in zip(rows, one_rank, strict=True):
        for name in SAME:
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), f"step {row['step']}: {name}"


def test_a_run_leaves_its_books(single_process: tuple[Path, list[dict[str, float]]]) -> None:
    folder, rows = single_process
    run = folder / "single"
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    optional = (
        "eval/",
        "environment/",
        "critic/",
        "teacher/",
        "loss/kl_",
        "loss/sampler_",
        "loss/drift_masked_share",
        "loss/filtered_share",
        "loss/selected_share",
        "profile/",
        "run/recovery_s",
        "reward/running_std",
        "reward/clipped_share",
        "reward/judged_mean",
        "rollout/num_unannotated",
        "routes/",
        "straggler/",
        "monitor/",
        "optimizer/merged_share",
        "turns/",
    )
    assert set(rows[0]) == {name for name in METRICS if not name.startswith(optional)}
    last = rows[-1]
    assert last["version"] == 8
    in_flight = sum(last[f"ledger/{state}"] for state in ("queued", "running", "partial", "finished"))
    assert last["ledger/trained"] == 4 * 16
    assert in_flight > 0
    assert rows[0]["mismatch/tokens"] > 0
    assert rows[0]["mismatch/logprob_mean"] < 1e-5
    assert sum(row["mismatch/alarms"] for row in rows) == 0
    assert last["staleness/max"] > 0
    assert last["rollout/resumed_token_share"] > 0
    assert (run / "checkpoints" / "latest").read_text() == "step-000004"
    assert "<html" in (run / "report.html").read_text()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {1, 2, 3, 4}


@pytest.mark.slow
def test_a_mismatch_is_told_and_the_decoupled_loss_trains(tmp_path: Path) -> None:
    """float32 rounding exceeds a limit of 1e-12: the run warns, counts and continues."""
    settings = ('loss.proximal="learner"', "monitor.mismatch_alarm=1e-12", "parallel.tensor=1", "parallel.data=2")
    done = bapo("train", "demo", *SMALL, f"run.dir={tmp_path}", "run.name=run", "train.num_steps=2", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["mismatch/alarms"] == 1, "from the first update: the second has no token of age 0"
    assert done.stdout.count("warning: mismatch, step 1: engine and trainer disagree") == 1
    when = "2 steps, from 1 to 2" if rows[1]["mismatch/alarms"] else "step 1"
    assert f"alarms     mismatch at {when}\n" in done.stdout
    assert 0.5 < rows[-1]["loss/importance_weight_mean"] < 2
    assert rows[-1]["loss/importance_weight_mean"] != 1
    assert all(math.isfinite(row["optimizer/grad_norm"]) for row in rows)


@pytest.mark.slow
def test_a_mismatch_may_end_a_run_which_then_continues_from_the_step_before(
    forked_engine: Engine, one_rank: list[dict[str, float]], tmp_path: Path
) -> None:
    """float32 rounding exceeds a limit of 1e-12, on both ranks."""
    run = partial(forked.train, forked_engine, tmp_path, "run", "parallel.tensor=1", "parallel.data=2")
    saving = "checkpoint.interval_steps=1"
    run("train.num_steps=2", saving, 'monitor.mismatch_action="stop"')
    settings = ("parallel.tensor=1", "parallel.data=2", "train.num_steps=3", saving, "monitor.mismatch_alarm=1e-12")
    told = forked.refusal(forked_engine, tmp_path, "run", *settings, 'monitor.mismatch_action="stop"')
    assert told.startswith("step 3: engine and trainer disagree about the log-probs of the same weights by ")
    assert told.endswith("then the same command continues after step-000002")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert [(alarm["name"], alarm["first_step"]) for alarm in status["alarms"]] == [("mismatch", 3)]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3, "the step is recorded, though not saved"
    rows = run("train.num_steps=3", saving)
    for row, expected in zip(rows, one_rank, strict=True):
        for name in SAME:
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), f"step {row['step']}: {name}"


@pytest.mark.slow
def test_resuming_goes_on_exactly(single_process: tuple[Path, list[dict[str, float]]]) -> None:
    """A run stopped after two steps and resumed has the same samples and losses, bit for bit, with default threads.

    For killed runs, see test_kill_resume.py.
    """
    folder, reference = single_process
    settings = ("parallel.tensor=1", "checkpoint.interval_steps=2")
    train(folder, "resumed", "train.num_steps=2", *settings)
    rows = train(folder, "resumed", "train.num_steps=4", *settings)
    assert len(rows) == 4
    for row, expected in zip(rows, reference, strict=True):
        for name in SAME:
            assert row[name] == expected[name], f"step {row['step']}: {name}"
    assert _sample_ids(folder / "resumed") == _sample_ids(folder / "single")
    assert (folder / "resumed" / "logs" / "attempt-2").is_dir()


def _sample_ids(run: Path) -> list[tuple[int, str, str]]:
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(s["step"], s["sample_id"], s["response"]) for s in samples]


def test_the_same_name_with_other_settings_says_what_differs(
    single_process: tuple[Path, list[dict[str, float]]],
) -> None:
    folder, _ = single_process
    done = bapo("train", "demo", *SMALL, f"run.dir={folder}", "run.name=single", "bapo.rho0=0.33")
    assert done.returncode == 2
    assert "bapo.rho0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_engine_that_cannot_be_reached_is_one_clear_error(tmp_path: Path) -> None:
    done = bapo(
        "train",
        "demo",
        *SMALL,
        f"run.dir={tmp_path}",
        "rollout.engine=attach",
        'rollout.urls=["http://127.0.0.1:9"]',
        "rollout.startup_timeout_s=3",
        "parallel.tensor=1",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "mode",
    [(), ("rollout.overlap=true", "rollout.max_staleness=5"), ("rollout.abort_tail=true",)],
    ids=["rounds", "overlap", "abort_tail"],
)
def test_every_mode_samples_trains_and_evaluates(forked_engine: Engine, tmp_path: Path, mode: tuple[str, ...]) -> None:
    settings = ("train.num_steps=3", "parallel.tensor=1", "eval.interval_steps=2", "eval.num_prompts=12")
    rows = forked.train(forked_engine, tmp_path, "mode", *settings, *mode)
    assert [("eval/reward" in row) for row in rows] == [False, True, True]
    assert all(0 <= row["eval/reward"] <= 1 and row["eval/num_samples"] == 12 for row in rows[1:])
    for row in rows:
        states = ("queued", "running", "partial", "finished", "trained", "dropped")
        assert sum(row[f"ledger/{state}"] for state in states) % 4 == 0, "whole groups"
        assert row["ledger/dropped"] == row["rollout/num_retries"] == row["rollout/num_fenced"] == 0
    if "rollout.overlap=true" in mode:
        assert max(row["staleness/max"] for row in rows) <= 5


@pytest.mark.slow
def test_mixed_sources_and_named_evaluation_sets_go_on_bit_for_bit_after_a_resume(
    forked_engine: Engine, tmp_path: Path
) -> None:
    settings = (
        "parallel.tensor=1",
        'data.sources=[{name="easy",options={max_terms=4},weight=3},{name="hard",options={min_terms=5}}]',
        "eval.interval_steps=2",
        'eval.sets=[{name="short",num_prompts=5,samples_per_prompt=2,options={max_terms=3}},'
        '{name="long",num_prompts=3,max_response_tokens=20}]',
    )
    whole = forked.train(forked_engine, tmp_path, "whole", "train.num_steps=4", *settings)
    forked.train(forked_engine, tmp_path, "resumed", "train.num_steps=2", *settings)
    resumed = forked.train(forked_engine, tmp_path, "resumed", "train.num_steps=4", *settings)
    compared = ("reward/mean", "loss/", "bapo/", "eval/", "data/", "ledger/")
    for row, expected in zip(resumed, whole, strict=True):
        assert {k: repr(v) for k, v in row.items() if k.startswith(compared)} == {  # repr: nan is not itself
            k: repr(v) for k, v in expected.items() if k.startswith(compared)
        }
        assert row["data/easy/prompt_share"] + row["data/hard/prompt_share"] == 1
    assert {name.split("/")[1] for name in whole[-1] if name.startswith("eval/")} == {"short", "long"}
    assert (whole[-1]["eval/short/num_samples"], whole[-1]["eval/long/num_samples"]) == (10, 3)
    assert whole[-1]["eval/long/response_tokens_mean"] <= 20
    samples = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    assert {sample["source"] for sample in samples} <= {"easy", "hard"}
    assert any(row["data/hard/prompt_share"] for row in whole)
