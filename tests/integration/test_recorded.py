"""Rollouts on disk: a replay repeats the run bit for bit, other settings train on the same data, gaps are reported."""

import gzip
from pathlib import Path

import pytest

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.errors import DataError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.rollout.recorded import read_groups, write_groups
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment, Trajectory
from tests.integration.forked import SMALL, refusal, train
from tests.integration.killable import Engine
from tests.integration.test_train import bapo

SAME = ("loss/policy", "loss/entropy", "bapo/low", "bapo/high", "optimizer/grad_norm", "reward/mean", "staleness/mean")


CLOCKS = ("time/", "perf/", "straggler/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s")


@pytest.fixture(scope="module")
def recorded(forked_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, train(
        forked_engine, folder, "original", "train.num_steps=3", "parallel.tensor=1", "rollout.record=true"
    )


def from_record(folder: Path) -> tuple[str, ...]:
    return ("rollout.engine=recorded", f"rollout.recorded_from={folder / 'original' / 'rollouts'}", "parallel.tensor=1")


def test_a_replay_repeats_every_loss_and_bound(
    forked_engine: Engine, recorded: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, original = recorded
    replayed = train(forked_engine, folder, "replay", "train.num_steps=3", *from_record(folder))
    assert [[row[name] for name in SAME] for row in replayed] == [[row[name] for name in SAME] for row in original]


def test_another_loss_trains_on_the_same_samples(
    forked_engine: Engine, recorded: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, original = recorded
    other = train(forked_engine, folder, "grpo", "train.num_steps=2", "loss.name=grpo", *from_record(folder))
    assert [row["reward/mean"] for row in other] == [row["reward/mean"] for row in original[:2]]
    assert other[0]["bapo/high"] == 1.2 != original[0]["bapo/high"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("parallel.data=2",), ("parallel.pipeline=2", "advantage.kind=gae")])
def test_shared_prompts_change_rounding_alone(
    forked_engine: Engine, recorded: tuple[Path, list[dict[str, float]]], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """The same updates of the same recorded samples, with proximal and reference log-probs, and with a critic."""
    folder, _ = recorded
    settings = (*from_record(folder), "loss.proximal=learner", "loss.kl_coef=0.1", "train.num_steps=3", *settings)
    copied, shared = (
        train(
            forked_engine, tmp_path, f"shared-{shares}", f"train.share_prompts={shares}", "train.deal=groups", *settings
        )
        for shares in ("false", "true")
    )
    assert all(row["perf/saved_token_share"] > 0.1 for row in shared)
    for row, expected in zip(shared, copied, strict=True):
        for name in (name for name in expected if not name.startswith(CLOCKS)):
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


@pytest.mark.slow
def test_a_step_that_was_not_recorded_or_is_damaged_is_one_clear_error(
    forked_engine: Engine, recorded: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder, _ = recorded
    arguments = (*SMALL, f"run.dir={folder}", *from_record(folder))
    done = bapo("train", "demo", *arguments, "run.name=too-long", "train.num_steps=4")
    assert done.returncode == 2
    assert "step-000004.jsonl.gz is missing" in done.stderr
    assert "holds 3 recorded steps" in done.stderr
    other_steps = ("train.num_steps=3", "train.minibatches_per_step=1")
    error = refusal(forked_engine, folder, "other-steps", *from_record(folder), *other_steps)
    assert "tokens of weight version 2, but this run is at version 1" in error

    with gzip.open(tmp_path / "step-000001.jsonl.gz", "wt") as file:
        file.write('{"prompt": 3}\n')
    with pytest.raises(ValueError, match=r"step-000001.jsonl.gz, line 1 cannot be read"):
        read_groups(tmp_path, 1)


def test_a_recording_with_routes_serves_runs_with_and_without_replay(tmp_path: Path) -> None:
    """One without routes serves no run that replays them."""
    prompt, (routes,) = (
        Prompt(0, (1, 2), "", "", ""),
        ModelFacts.of(resolve_model_path("moe")).returned_streams({"routes"}),
    )
    for folder, kept in ((tmp_path / "with", (routes,)), (tmp_path / "without", ())):
        given, sampled = ({stream: stream.filled(num) for stream in kept} for num in (2, 3))
        segments = Segment.given("prompt", (1, 2), given), Segment.sampled(0, 0, (3, 4, 5), [-1.0] * 3, sampled)
        write_groups(folder, 1, [Group(prompt, (Sample("0.0", prompt, (Trajectory(segments),), Ended("stop", 1.0)),))])
    assert read_groups(tmp_path / "with", 1) == read_groups(tmp_path / "without", 1)
    (group,) = read_groups(tmp_path / "with", 1, [routes])
    assert all(routes in segment.rows for segment in group.samples[0].trajectories[0].segments)
    with pytest.raises(DataError, match=r"line 1 cannot be read: response 0\.0 of prompt 0: stream routes: is missing"):
        read_groups(tmp_path / "without", 1, [routes])


def test_rollouts_alone_leave_the_weights_as_they_are(forked_engine: Engine, tmp_path: Path) -> None:
    settings = ("train.num_steps=2", "parallel.tensor=1", "train.rollout_only=true", "rollout.record=true")
    rows = train(forked_engine, tmp_path, "sampling", *settings)
    assert [row["version"] for row in rows] == [0, 0]
    assert "loss/policy" not in rows[0]
    assert {v for g in read_groups(tmp_path / "sampling" / "rollouts", 2) for t in g.samples for v in t.versions} == {0}
    assert read_metrics(tmp_path / "sampling" / "metrics.jsonl") == rows
