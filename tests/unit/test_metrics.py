"""The registry of metrics against its documentation, the files that hold them, and the sums drawn from them."""

import contextlib
import itertools
import json
import logging
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.buffer.batch import BatchBuilder, batch_metrics
from bapo_megatron.config.load import load_config
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.page import metrics_page
from bapo_megatron.metrics import METRIC_FAMILIES, METRICS, declared, reduce_updates
from bapo_megatron.monitor.record import sample_record, turn_advantages
from bapo_megatron.runs.numbers import count, duration, short_number
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runs.summary import summarize_run
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl, truncate_after
from bapo_megatron.runtime.heartbeat import Heartbeat
from bapo_megatron.runtime.stopwatch import Stopwatch
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment, Trajectory


def write_steps(path: Path, *steps: int, reward: float = 0.5) -> None:
    with contextlib.closing(JsonlWriter(path)) as writer:
        for step in steps:
            writer.write({"step": step, "reward/mean": reward})


def test_the_page_describes_exactly_the_declared_metrics() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| .+ \|$", metrics_page(), re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows), "a metric is documented twice"
    ages = ["age_0", "age_1_3", "age_4_up"]
    bins = [f"p{b}0" for b in range(10)]  # bins of probabilities: pNN in the table stands for all of them
    names = {(name.replace("pNN", b).replace("AGE", age), unit) for name, unit in rows for b in bins for age in ages}
    of_losses = {metric.key: metric for loss in LOSSES.values() for metric in loss.metrics}
    assert names == {(name, metric.unit) for name, metric in (METRICS | METRIC_FAMILIES | of_losses).items()}


def test_a_metric_of_something_that_the_settings_name_has_the_declaration_of_its_family() -> None:
    metric = declared("eval/aime-24/truncated_share")
    assert metric is not None
    assert (metric.key, metric.unit) == ("eval/aime-24/truncated_share", "share")
    assert declared("reward/mean") is METRICS["reward/mean"]
    assert declared("eval/aime/nothing") is declared("nothing") is declared("data/a/b/reward") is None


def test_a_metric_that_is_not_declared_is_averaged_over_the_updates() -> None:
    assert reduce_updates({"my/own": [1.0, math.nan, 2.0], "my/empty": [math.inf]}) == pytest.approx(
        {"my/own": 1.5, "my/empty": math.nan}, nan_ok=True
    )


def test_written_steps_come_back_with_nan_for_what_json_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(JsonlWriter(path)) as writer:
        writer.write({"step": 1, "bapo/positive_share": math.nan, "loss/ratio_max": math.inf, "reward/mean": 0.25})
        assert read_metrics(path)[0]["reward/mean"] == 0.25, "a step must be readable before the file is closed"
    assert '"bapo/positive_share": null' in path.read_text()
    (row,) = read_metrics(path)
    assert row["step"] == 1
    assert math.isnan(row["bapo/positive_share"])
    assert math.isnan(row["loss/ratio_max"])


def test_a_torn_last_line_is_skipped_with_a_notice_and_cut_before_appending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "rewa')
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert "line 3" in caplog.text
    write_steps(path, 3)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_of_a_step_written_twice_the_later_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3, reward=0.1)
    write_steps(path, 2, reward=0.9)
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(path)] == [(1, 0.1), (2, 0.9), (3, 0.1)]


def test_truncate_after_keeps_the_steps_up_to_the_resumed_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4)
    assert truncate_after(path, 2) == 2
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert truncate_after(path, 2) == 0
    assert truncate_after(tmp_path / "missing.jsonl", 5) == 0


def test_a_missing_file_has_no_steps(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_lines_that_are_not_objects_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('[1]\n\n"text"\n{"step": 1}\n')
    assert read_jsonl(path) == [{"step": 1}]


def test_a_sample_keeps_its_segments_and_survives_the_file(tmp_path: Path) -> None:
    prompt = Prompt(7, (1,), "3+5=", {"value": 1}, "chains")
    segments = (Segment.sampled(4, 2, (1, 2), (-0.1, -0.2)), Segment.sampled(6, 3, (3,), (-0.3,)))
    sample = Sample.of("7.0", prompt, segments, Ended("stop", 1.0))
    record = sample_record(3, sample, lambda ids: "".join("_ü\nz"[i] for i in ids))
    assert [(s["version"], s["num_tokens"], s["text"]) for s in record["segments"]] == [(4, 2, "ü\n"), (6, 1, "z")]
    assert record["response"] == "ü\nz"
    writer = JsonlWriter(tmp_path / "samples.jsonl")
    writer.write(record)
    writer.close()
    assert read_jsonl(tmp_path / "samples.jsonl") == [record]


def test_a_sample_with_branches_keeps_all_authors_and_the_rewards_of_its_turns() -> None:
    prompt = Prompt(7, (1,), "3+5=", "8", "chains")
    turn, answer = Segment.sampled(4, 2, (2,), (-0.1,)), Segment.given("environment", (3,))
    sample = Sample.of("7.0", prompt, (turn, answer), Ended("turns", 0.75))
    rewritten = Trajectory((Segment.given("prompt", (2, 2)), Segment.sampled(5, 3, (1,), (-0.2,))))
    shared = sample.trajectories[0].branch(2).extended([Segment.sampled(5, 3, (3,), (-0.3,))])
    sample = replace(sample, trajectories=(*sample.trajectories, rewritten, shared), turn_rewards=({"a": 0.5}, None))
    record = sample_record(3, sample, lambda ids: "".join("_abc"[i] for i in ids))
    assert [[(s.get("by"), s["text"]) for s in branch] for branch in (*record["branches"], record["segments"])] == [
        [(None, "b"), ("environment", "c")],
        [("prompt", "bb"), (None, "a")],
        [("trajectory", "b"), (None, "c")],
    ]
    assert (record["turn_rewards"], record["response"], record["num_tokens"]) == ([0.5, None], "bc", 3)
    unused = Sample.of("7.1", prompt).trajectories  # the bare prompt of a sample that an agent drives
    alone = replace(sample, trajectories=(*unused, rewritten), turn_rewards=(None,))
    assert {"branches", "turn_rewards"}.isdisjoint(found := sample_record(3, alone, lambda ids: "x" * len(ids)))
    assert found["response"] == "x", "the policy's"


def test_parts_of_the_reward_are_metrics_and_stand_next_to_the_sample() -> None:
    prompt, segments = Prompt(7, (1,), "3+5=", "8", "chains"), (Segment.sampled(4, 2, (1,), (-0.1,)),)
    ends = [Ended("stop", 1.0, message="as it should be", parts={"correct": 1.0, "format": 0.5}), Ended("stop", 0.0)]
    samples = tuple(Sample.of(f"7.{i}", prompt, segments, end) for i, end in enumerate(ends))
    metrics = batch_metrics([Group(prompt, samples)])
    assert (metrics["reward/correct/mean"], metrics["reward/format/mean"], metrics["reward/mean"]) == (1.0, 0.5, 0.5)
    assert declared("reward/format/mean") is not None
    with_parts, without = (sample_record(3, sample, lambda ids: "x") for sample in samples)
    assert (with_parts["parts"], with_parts["reason"]) == ({"correct": 1.0, "format": 0.5}, "as it should be")
    assert {"parts", "reason"}.isdisjoint(without)


@given(
    st.data(),
    st.sampled_from(["grpo", "dr_grpo", "rloo", "grpo_turns", "reinforce_plus_plus_baseline", "gae"]),
    st.booleans(),
)
def test_each_recorded_sample_has_the_advantages_that_were_trained(
    data: st.DataObject, kind: str, whitens: bool
) -> None:
    number = itertools.count()

    def sample(group: int, index: int) -> Sample:
        name, prompt = f"{group}.{index}", Prompt(group, (1,), "q", "a", "chains")
        trajectories, rewards = [], []
        for _ in range(data.draw(st.integers(1, 2))):
            segments = [Segment.given("prompt", (1,))]
            for _ in range(data.draw(st.integers(0, 3))):
                num = data.draw(st.integers(1, 3))
                segments.append(Segment.sampled(0, 1, (next(number),) * num, (-0.1,) * num))  # its own token
                segments.append(Segment.given("environment", (2,)))
                rewards.append(float(data.draw(st.integers(0, 3))))
            trajectories.append(Trajectory(tuple(segments)))
        is_failed = data.draw(st.booleans()) and index > 0
        end = Ended("failed", None) if is_failed else Ended("stop", sum(rewards))
        return Sample(name, prompt, tuple(trajectories), end, turn_rewards=tuple(rewards))

    groups = [
        Group(Prompt(g, (1,), "q", "a", "chains"), tuple(sample(g, i) for i in range(data.draw(st.integers(1, 4)))))
        for g in range(data.draw(st.integers(1, 3)))
    ]
    hypothesis.assume(any(s.num_sampled_tokens for g in groups for s in g.valid))
    settings = [f"advantage.kind={kind}", "environment.kind=guess"]
    config = load_config(["demo"], [*settings, f"advantage.whiten_batch={str(whitens).lower()}"])
    batch = BatchBuilder(config).build(groups, {})
    found = turn_advantages(groups, batch)
    trained = {s.sample_id: s for g in groups for s in g.valid}
    assert found.keys() == trained.keys()
    tokens, advantages = batch.token_ids_T[batch.sampled_T], batch.advantages_T[batch.sampled_T]
    by_token = dict(zip(tokens.tolist(), advantages.tolist(), strict=True))
    for name, one in trained.items():
        assert found[name] == [by_token[int(turn[0])] for t in one.trajectories for turn in t.turns]


def test_an_advantage_stands_next_to_the_reward() -> None:
    prompt = Prompt(7, (1,), "3+5=", "8", "chains")
    one = Sample.of("7.0", prompt, (Segment.sampled(4, 2, (1,), (-0.1,)),), Ended("stop", 1.0))
    for values, shown in ((None, None), ([], None), ([0.5], 0.5), ([0.5, 0.5], 0.5), ([0.5, None], [0.5, None])):
        assert sample_record(3, one, str, values).get("advantage") == shown


def test_stopwatch_accounts_for_all_of_a_step() -> None:
    now = 100.0
    watch = Stopwatch(Heartbeat(), ("rollout", "train"), clock=lambda: now)
    for _ in range(2):
        with watch.span("rollout"):
            now += 2.0
    with contextlib.suppress(KeyError), watch.span("train"):
        now += 3.0
        raise KeyError  # an error inside a span must not lose its time
    now += 0.5
    assert watch.lap() == {"time/step_s": 7.5, "time/rollout_s": 4.0, "time/train_s": 3.0, "time/other_s": 0.5}
    now += 1.0
    assert watch.lap() == {"time/step_s": 1.0, "time/rollout_s": 0.0, "time/train_s": 0.0, "time/other_s": 1.0}


def test_stopwatch_refuses_to_count_time_twice() -> None:
    watch = Stopwatch(Heartbeat(), ("rollout", "train"))
    with watch.span("rollout"), pytest.raises(AssertionError, match="inside"), watch.span("train"):
        pass


def test_summary_compares_ten_steps_at_each_end_and_weighs_by_tokens() -> None:
    rows = [
        {
            "step": float(i),
            "reward/mean": 0.0 if i <= 10 else 1.0 if i > 20 else 0.5,
            "rollout/resumed_token_share": 0.0 if i <= 20 else 1.0,
            "train/tokens": 100.0 if i <= 20 else 400.0,
            "staleness/mean": 2.0,
            "staleness/max": float(i % 7),
            "time/step_s": 2.0,
        }
        for i in range(1, 31)
    ]
    summary = summarize_run(rows)
    assert (summary.reward_first, summary.reward_last, summary.window_steps) == (0.0, 1.0, 10)
    assert summary.resumed_token_share == pytest.approx(4000 / 6000)
    assert (summary.staleness_mean, summary.staleness_max, summary.wall_time_s) == (2.0, 6.0, 60.0)


def test_summary_of_a_short_run_takes_windows_that_do_not_overlap() -> None:
    rows = [{"step": float(i), "reward/mean": float(i)} for i in range(1, 6)]
    summary = summarize_run(rows)
    assert (summary.window_steps, summary.reward_first, summary.reward_last) == (2, 1.5, 4.5)
    assert "- resumed" in summary.text()


@pytest.mark.parametrize(
    ("rewards", "label"),
    [((0.0, 1.0, 1.0), "pass rate"), ((1.0,), "pass rate"), ((3.41,), "reward"), ((0.0, 0.5), "reward")],
)
def test_a_mean_reward_is_a_pass_rate_only_if_all_rewards_are_0_or_1(rewards: tuple[float, ...], label: str) -> None:
    row = {"step": 1.0, "reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}
    assert summarize_run([row]).text().startswith(f"{label:9}  {row['reward/mean']:.2f} -> ")


def test_numbers_are_short() -> None:
    assert [count(x) for x in (0, 999, 999.6, 1234, 99_960, 2.5e6, 3e9)] == [
        "0", "999", "1.0k", "1.2k", "100k", "2.5M", "3.0G",
    ]  # fmt: skip
    values = (0, 0.53412, 2.5e-5, 9999.9, 12_346, -999_960, 2.5e9, 1e13, math.nan)
    assert [short_number(x) for x in values] == [
        *("0", "0.5341", "2.5e-05", "10K", "12.35K", "-1M", "2.5B", "10T", "-"),
    ]
    assert [duration(x) for x in (12.34, 59.96, 245, 3725)] == ["12.3 s", "1 min 00 s", "4 min 05 s", "1 h 02 min"]
