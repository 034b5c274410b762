"""Alarms: each rule at its boundary, none in healthy runs, and what the user is told, once, in three ways."""

import csv
import io
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.config.load import load_config
from bapo_megatron.config.paths import schema
from bapo_megatron.config.schema import EnvironmentConfig
from bapo_megatron.errors import DivergedError, NoGroupKeptError, UserError
from bapo_megatron.metrics import METRICS
from bapo_megatron.monitor.alarms import RULES, Alarm, AlarmLog, Rule, first_impressions
from bapo_megatron.monitor.console import Console
from bapo_megatron.monitor.record import Recorder
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.history import read_history
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runtime.straggler import straggler_metrics
from tests.unit.run_folders import make_run, plain, step
from tests.unit.test_full_disk import full_disk

Metrics = Mapping[str, float]
ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies" / "results"

# A step at which nothing is wrong, with the metrics that rules read.
WELL: Metrics = {
    "reward/mean": 0.4,
    "reward/std": math.sqrt(0.4 * 0.6),
    "rollout/num_samples": 64.0,
    "rollout/num_groups": 8.0,
    "rollout/num_dropped_groups": 4.0,
    "rollout/zero_variance_share": 0.3,
    "rollout/truncated_share": 0.1,
    "staleness/mean": 0.5,
    "loss/entropy": 0.2,
    "loss/clip_high_share": 0.1,
    "loss/clip_low_share": 0.05,
    "loss/positive_token_share": 0.4,
    "loss/negative_token_share": 0.4,
    "loss/approx_kl": 1e-4,
    "loss/kl_reference": 1e-3,
    "optimizer/lr": 1e-6,
    "optimizer/grad_norm": 0.3,
    "optimizer/grad_alarms": 0.0,
    "optimizer/skipped": 0.0,
    "mismatch/alarms": 0.0,
    "bapo/inert_share": 0.4,
    "bapo/saturated_share": 0.4,
    "bapo/positive_share": 0.5,
}


def raised(*rows: Metrics) -> list[Alarm]:
    return AlarmLog({**row, "step": float(i)} for i, row in enumerate(rows, start=1)).raised


def names(*rows: Metrics) -> list[str]:
    return [alarm.name for alarm in raised(*rows)]


def test_nothing_is_wrong_with_steps_at_which_nothing_is_wrong() -> None:
    assert names(*[WELL] * 30) == []
    assert names({"reward/mean": 0.5}) == []


ON_POLICY = {"staleness/mean": 0.0, "loss/approx_kl": 0.0}

LASTING: list[tuple[str, Metrics, list[Metrics]]] = [  # alarm, what its steps show, and what just misses it
    (
        "equal rewards",
        {"rollout/zero_variance_share": 0.95},
        [{"rollout/zero_variance_share": 0.94}, {"teacher/kl": 0.1}],
    ),
    (
        "no group kept",
        {"rollout/num_groups": 5.0, "rollout/num_dropped_groups": 95.0},
        [{"rollout/num_dropped_groups": 94.0}, {"rollout/num_groups": 0.0, "rollout/num_dropped_groups": 0.0}],
    ),
    ("most responses cut", {"rollout/truncated_share": 0.5}, [{"rollout/truncated_share": 0.49}]),
    ("all responses cut", {"rollout/truncated_share": 1.0}, []),  # 0.99 is another alarm
    (
        "no entropy",
        {"loss/entropy": 0.005},
        [
            {"loss/entropy": 0.0051},
            {"reward/mean": 0.91, "reward/std": math.sqrt(0.91 * 0.09)},
            {"loss/entropy": math.nan},
        ],
    ),
    (
        "all tokens clipped",
        {"loss/clip_high_share": 0.4, "loss/clip_low_share": 0.25},
        [
            {"loss/clip_low_share": 0.23},
            {"loss/positive_token_share": 0.0, "loss/negative_token_share": 0.0},
        ],
    ),
    ("all tokens filtered", {"loss/filtered_share": 0.8}, [{"loss/filtered_share": 0.79}]),
    (
        "policy stands still",
        {"loss/approx_kl": 1e-8},
        [
            {"loss/approx_kl": 2e-8},
            {"staleness/mean": 0.09},
            {"optimizer/lr": 0.0},
        ],
    ),
    (
        "policy stands still",
        ON_POLICY | {"loss/kl_reference": 0.0},
        [{"loss/kl_reference": 2e-8}, {"loss/kl_reference": math.nan}],
    ),
    ("policy stands still", ON_POLICY | {"optimizer/grad_norm": 0.0}, [{"optimizer/grad_norm": 1e-9}]),
    (
        "inert bounds",
        {"bapo/inert_share": 1.0},
        [{"bapo/inert_share": 0.99}, {"bapo/positive_share": math.nan}],
    ),
    ("saturated search", {"bapo/saturated_share": 1.0}, [{"bapo/saturated_share": 0.99}]),
]


@pytest.mark.parametrize(("name", "sick", "not_quite"), LASTING)
def test_an_alarm_of_a_lasting_state_takes_five_steps_or_all_of_the_last_ten(
    name: str, sick: Metrics, not_quite: list[Metrics]
) -> None:
    bad = {**WELL, **sick}
    assert names(*[bad] * 4) == [], "four steps are too few to judge"
    (alarm,) = raised(*[bad] * 7)
    assert (alarm.name, alarm.first_step, alarm.last_step) == (name, 5, 7)
    (later,) = raised(*[WELL] * 10, *[bad] * 10)
    assert (later.name, later.first_step) == (name, 20)
    if name != "no group kept":  # this one is counted over steps
        assert names(*[WELL] * 10, *[bad] * 9) == []
    for change in not_quite:
        assert name not in names(*[{**bad, **change}] * 12)


def test_nearly_all_cut_is_most_and_not_all() -> None:
    assert names(*[{**WELL, "rollout/truncated_share": 0.99}] * 12) == ["most responses cut"]
    assert names(*[{**WELL, "rollout/truncated_share": 1.0}] * 12) == ["all responses cut"]


def test_a_mismatch_is_told_at_its_step() -> None:
    (alarm,) = raised(WELL, {**WELL, "mismatch/alarms": 2.0}, WELL)
    assert (alarm.name, alarm.first_step, alarm.last_step) == ("mismatch", 2, 2)


def spiking(*counts: int, num_updates: int = 4) -> list[str]:
    return names(
        *[
            {**WELL, "version": float(num_updates * i), "optimizer/grad_alarms": c}
            for i, c in enumerate(counts, start=1)
        ]
    )


@pytest.mark.parametrize(
    ("row", "is_large"),
    [
        ({"loss/approx_kl": 1.0}, True),
        ({"loss/approx_kl": 0.99}, False),
        ({"loss/approx_kl": math.nan}, False),
        ({"optimizer/lr": 0.02}, True),
        ({"optimizer/lr": 0.019}, False),
        ({"optimizer/lr": 100.0, "loss/approx_kl": math.nan}, True),
        ({"loss/approx_kl": 9.0, "mismatch/alarms": 1.0}, False),  # then the sampler was another one
    ],
)
def test_updates_that_replace_the_policy_are_told_at_the_first_step(row: Metrics, is_large: bool) -> None:
    assert ("large updates" in names({**WELL, **row})) == is_large


def test_a_large_rate_is_written_in_full() -> None:
    (alarm,) = AlarmLog([{**WELL, "step": 1.0, "optimizer/lr": 100.0}]).raised
    assert alarm.saw == "the learning rate is 100."


TURNS = {kind: EnvironmentConfig(kind=kind) for kind in ("none", "tools", "agent", "guess")}
TURNS["one turn"] = EnvironmentConfig(kind="guess", max_turns=1)


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 400), st.sampled_from(sorted(TURNS)))
def test_the_first_step_says_what_nearly_all_responses_lack(num: int, cut: int, answered: int, kind: str) -> None:
    cut, answered = min(cut, num), min(answered, num)
    row = {"rollout/num_samples": float(num), "rollout/truncated_share": cut / num}
    if kind != "none":
        row["environment/answered_share"] = answered / num
    lines = first_impressions(row, TURNS[kind], 7)
    begins = [line.partition(":")[0] for line in lines]
    expected = [f"{cut} of the {num} responses were cut at rollout.max_response_tokens=7"] if cut >= 0.95 * num else []
    if kind in ("tools", "guess") and answered / num <= 1 - 0.95:
        did = "called a tool" if kind == "tools" else "continued after the first turn"
        never = "and a policy that never does so cannot learn it (docs/turns.md)"
        expected.append(f"{answered} of the {num} responses {did}, {never}")
    assert begins == expected
    assert first_impressions({}, TURNS[kind], 7) == []


def test_spikes_are_an_alarm_if_they_are_many() -> None:
    assert spiking(2) == [], "with few updates, two may be chance"
    assert spiking(3) == ["gradient spikes"]
    assert spiking(*[0] * 20, 1, 1, 1, 1, 1, 1, 1, 1) == ["gradient spikes"], "a fifth of the latest 40"
    assert spiking(*[0] * 20, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) == []
    assert spiking(*[1] * 20, num_updates=6) == [], "one now and then is normal"


def test_one_reward_for_all_is_told_from_the_first_step_and_explains_the_rest() -> None:
    empty = {**WELL, "reward/mean": 3.41, "reward/std": 0.0, "rollout/zero_variance_share": 1.0}
    empty |= {"optimizer/grad_norm": 0.0, "bapo/inert_share": 1.0, "bapo/positive_share": math.nan}
    (alarm,) = raised(empty)
    assert alarm.saw == "all 64 responses of this step have the same reward, 3.41."
    assert names(*[empty] * 10) == ["one reward"], "bounds, groups and the gradient are not another cause"
    for healthy in ({"reward/std": 0.1}, {"rollout/num_samples": 63.0}):
        assert names({**empty, **healthy}) == []
    half = {**empty, "rollout/num_samples": 32.0}
    assert names(half, {**half, "reward/mean": 0.0}) == [], "the judge distinguishes two steps"


def test_skipped_updates_are_an_alarm_if_they_are_many() -> None:
    """The metric is a total since the attempt began."""

    def skipping(*totals: int, **metrics: float) -> list[Alarm]:
        rows = [{**WELL, **metrics, "version": 2.0 * i, "optimizer/skipped": n} for i, n in enumerate(totals, start=1)]
        return raised(*rows)

    assert skipping(1, 2, 2, 2, 2) == [], "two may be chance"
    (alarm,) = skipping(1, 2, 3, 4, 5, 6, **{"loss/approx_kl": 0.0})
    assert (alarm.name, alarm.first_step) == ("skipped updates", 3), "this explains a policy that stands still"
    assert alarm.saw == "3 of the 6 updates of the last 3 steps were skipped: no finite gradient."
    (alarm,) = skipping(*[20] * 30)
    assert alarm.last_step == 10, "the first step's are over"
    (alarm,) = skipping(*[0] * 10, 1, 2, 0, 2)
    assert alarm.first_step == 14, "four of twenty, in two attempts"
    assert skipping(*[0] * 10, 1, 2, 0, 1) == []


# evaluations


def evaluated(rates: list[float], error: float = 0.01, train: Callable[[int], float] = lambda i: 0.4) -> list[Metrics]:
    rows: list[Metrics] = []
    for i, rate in enumerate(rates):
        mean = train(i)
        rows.append(
            {
                **WELL,
                "reward/mean": mean,
                "reward/std": math.sqrt(mean * (1 - mean)),
                "eval/aime/reward": rate,
                "eval/aime/reward_stderr": error,
            }
        )
    return rows


def test_a_pass_rate_is_flat_if_a_rise_can_be_excluded() -> None:
    assert names(*evaluated([0.3] * 4)) == [], "four evaluations are too few"
    (alarm,) = raised(*evaluated([0.3] * 5))
    assert (alarm.name, alarm.first_step) == ("flat pass rate", 5)
    assert alarm.saw == "eval/aime/reward has not risen in 5 evaluations: it is 0.300, its rise +0.000 ± 0.025."
    assert names(*evaluated([0.3, 0.29, 0.31, 0.3, 0.28])) == ["flat pass rate"]
    assert names(*evaluated([0.5, 0.4, 0.3, 0.2, 0.1])) == ["flat pass rate"], "falling is not rising"


def test_the_precision_of_the_evaluations_decides() -> None:
    just_enough = 0.05 / 1.96 / 1.265  # the rise over five has sqrt(1.6) times the error of one
    assert names(*evaluated([0.3] * 5, just_enough * 0.99)) == ["flat pass rate"]
    assert names(*evaluated([0.3] * 5, just_enough * 1.01)) == []
    assert names(*evaluated([0.3] * 40, 0.03)) == ["flat pass rate"], "many make up for it"
    assert names(*evaluated([0.3] * 5, math.nan)) == []


@pytest.mark.parametrize(
    ("rates", "error"),
    [
        ([0.30, 0.31, 0.32, 0.33, 0.34], 0.01),  # 0.04 ± 0.025: a slow rise is a rise
        ([0.30, 0.31, 0.33, 0.33, 0.33], 0.01),  # it excludes no rise of 0.05
        ([0.90] * 5, 0.01),  # a plateau near the top
        ([0.89] * 5, 0.012),
    ],
)
def test_a_pass_rate_that_rises_or_is_high_is_not_flat(rates: list[float], error: float) -> None:
    assert names(*evaluated(rates, error)) == []


def test_a_plateau_after_learning_is_not_flat() -> None:
    """The evaluations began after most was learned, as the rewards of training show."""
    flat = [0.6] * 30
    assert names(*evaluated(flat, train=lambda i: min(0.3 + 0.03 * i, 0.6) + 0.02 * (i % 2))) == []
    assert names(*evaluated(flat, train=lambda i: 0.6 + 0.02 * (i % 2))) == ["flat pass rate"]


def test_a_mean_reward_of_other_values_than_0_and_1_has_no_pass_rate() -> None:
    assert names(*[{**row, "reward/std": 1.7} for row in evaluated([0.3] * 6)]) == []


# rising entropy


def entropies(levels: Iterable[float], passes: Iterable[float]) -> list[Metrics]:
    pairs = zip(levels, passes, strict=True)
    return [{**WELL, "loss/entropy": x, "reward/mean": p, "reward/std": math.sqrt(p * (1 - p))} for x, p in pairs]


def stretches(num: int, growth: float, passes: tuple[float, ...]) -> list[Metrics]:
    """Return four stretches of `num` steps, each with its mean reward, and its entropy `growth` times the previous."""
    means = [p + 0.01 * (-1) ** i for p in passes for i in range(num)]
    return entropies([0.2 * growth**k for k in range(4) for _ in range(num)], means)


FALLING = (0.6, 0.6, 0.55, 0.5)


@pytest.mark.parametrize("num", [5, 15, 45])
def test_entropy_that_rises_over_four_stretches_while_rewards_fall_is_an_alarm(num: int) -> None:
    rows = stretches(num, 1.251, FALLING)
    (alarm,) = raised(*[WELL] * 3, *rows)
    assert (alarm.name, alarm.first_step) == ("rising entropy", 3 + 4 * num)
    assert alarm.saw == (
        f"within {4 * num} steps, the entropy rose from 0.2 to 0.39 nats per token and the mean reward fell from 0.6 "
        "to 0.5."
    )
    assert names(*rows[1:]) == [], "too few steps"
    assert names(*stretches(num, 1.24, FALLING)) == []
    assert names(*stretches(num, 1 / 1.26, FALLING)) == []
    assert names({**WELL, "mismatch/alarms": 1.0}, *rows[:-1], {**rows[-1], "mismatch/alarms": 1.0}) == ["mismatch"]


@pytest.mark.parametrize(
    "passes",
    [
        (0.3, 0.4, 0.5, 0.6),  # early training: the policy learns
        (0.6, 0.6, 0.6, 0.6),  # an entropy bonus of the right size
        (0.6, 0.6, 0.6, 0.57),  # by less than a tenth of the rewards' standard deviation
        (0.6, 0.4, 0.3, 0.35),  # it recovers
    ],
)
def test_entropy_may_rise_while_rewards_do_not_fall(passes: tuple[float, ...]) -> None:
    assert names(*stretches(5, 1.5, passes)) == []


def test_entropy_that_is_0_or_unknown_does_not_rise() -> None:
    rows = stretches(5, 1.5, FALLING)
    for level in (0.0, -1e-9, math.nan):  # rounding may leave it below 0
        assert "rising entropy" not in names(*[{**row, "loss/entropy": level} for row in rows])
    assert names(*[{**row, "reward/mean": math.nan} for row in rows]) == []


@given(
    at=st.integers(1, 70),
    num_steps=st.integers(1, 3),
    factor=st.floats(0.05, 20.0),
    after=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
def test_other_data_raise_no_alarm(at: int, num_steps: int, factor: float, after: float, seed: int) -> None:
    """Overlapping rollouts mix old and new prompts for some steps."""
    noise = random.Random(seed)
    mixed = [min(1.0, max(0.0, (i - at) / num_steps)) for i in range(1, 90)]
    levels = [0.3 * (1 + (factor - 1) * part) * noise.uniform(0.93, 1.07) for part in mixed]
    passes = [(0.8 + (0.8 * after - 0.8) * part) * noise.uniform(0.9, 1.1) for part in mixed]
    assert "rising entropy" not in names(*entropies(levels, passes))


RUNS = [json.loads(line) for line in Path(__file__).with_name("entropy_runs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["settings"] or "demo")
def test_the_alarm_tells_runs_that_fall_apart_from_healthy_ones(run: dict[str, Any]) -> None:
    """Recorded by `bapo train demo` with 64 responses per update, one update per step and a learning rate of 5e-4."""
    rows = entropies(run["entropy"], run["pass_rate"])
    alarms = {alarm.name: alarm.first_step for alarm in raised(*rows)}
    assert alarms.get("rising entropy") == run["alarm"]


# learning rates


def test_a_policy_may_stand_still_while_the_rate_warms_up_and_at_the_end_of_its_schedule() -> None:
    still = {**WELL, "loss/approx_kl": 0.0}
    assert names(*[{**still, "optimizer/lr": 1e-9 * i} for i in range(1, 30)]) == []
    assert names(*[WELL] * 5, *[{**still, "optimizer/lr": 0.9e-7}] * 10) == [], "a tenth of the peak is the end"
    assert names(*[WELL] * 5, *[{**still, "optimizer/lr": 1.1e-7}] * 10) == ["policy stands still"]


# healthy runs


def study_histories() -> dict[str, list[Metrics]]:
    """Return rows of every curve that a committed study keeps, for the mean over seeds and both ends of the spread."""
    rows: dict[str, dict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(STUDIES.glob("*.csv")):
        with path.open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if not line["x"] or line["figure"].startswith("profile/"):
                    continue
                for kind in ("low", "mean", "high"):
                    row = rows[f"{path.stem}, {line['variant']}, {kind}"][float(line["x"])]
                    row[line["figure"]] = value = float(line[kind] or "nan")
                    if line["figure"] == "clip_share":
                        row |= {"loss/clip_high_share": value, "loss/clip_low_share": 0.0}
                        row |= {"loss/positive_token_share": 0.5, "loss/negative_token_share": 0.5}
                    if line["figure"] == "eval/reward":
                        row["eval/reward_stderr"] = math.sqrt(value * (1 - value) / 256)
    return {name: [row for _, row in sorted(of_run.items())] for name, of_run in rows.items()}


def test_no_other_alarm_goes_off_in_the_committed_studies() -> None:
    """In the study of turns, the searches of two variants do end at their limits for ten steps in a row. In the pilot,
    GRPO solves the shortest chains and stays there, and most first answers to long words are cut."""
    histories = study_histories()
    assert len(histories) > 150
    found = {name: fired for name, rows in histories.items() if (fired := names(*rows))}
    saturated = [f"turns, guessing game, {kind}" for kind in ("low", "mean", "high")] + ["turns, sums, one turn, high"]
    solved, cut = (
        [f"headroom, {variant}, {kind}" for kind in ("low", "mean", "high")]
        for variant in ("3 to 6 terms", "spelling, 5 to 9 letters")
    )
    kinds = (("saturated search", saturated), ("flat pass rate", solved), ("most responses cut", cut))
    assert found == {name: [alarm] for alarm, those in kinds for name in those}


# what the user is told


class NoRollouts:
    """What a recorder asks of rollouts."""

    decode = staticmethod(str)
    prompt_digests: ClassVar[dict[str, str]] = {}


def record(folder: Path, first_step: int, rows: list[Metrics], error: UserError | None = None) -> str:
    """Record an attempt that starts after `first_step`, and ends with an error or marks the run as finished."""
    config = load_config(["demo"], [f"run.dir={folder}", "run.name=run", "train.num_steps=20"])
    screen = io.StringIO()
    with RunDir.open(config) as run_dir:
        assert status_of(folder)["state"] == "starting"
        recorder = Recorder(config, run_dir, Console("lines", 20, stream=screen))
        recorder.begin(first_step, NoRollouts())  # type: ignore[arg-type]
        assert status_of(folder)["state"] == "training"
        for i, row in enumerate(rows, start=first_step + 1):
            recorder.record(i, i, row | {"time/step_s": 1.0, "reward/failed_share": 0.0})
            assert status_of(folder)["step"] == i
        if error is not None:
            recorder.fail(error)
        run_dir.mark("failed" if error is not None else "finished")
        recorder.end()
    return screen.getvalue()


def status_of(folder: Path) -> dict[str, Any]:
    status = json.loads((folder / "run" / "status.json").read_text())
    assert list(status) == ["state", "attempt", "step", "planned_steps", "time", "alarms"]
    return dict(status)


CUT: Metrics = {**WELL, "rollout/truncated_share": 1.0}


def test_a_part_with_a_wrong_name_is_left_out_with_one_warning(tmp_path: Path) -> None:
    parts = {"reward/good/mean": 0.5, "reward/\x1b]0;owned\x07/mean": 1.0, "reward/a b/mean": 1.0}
    screen = record(tmp_path, 0, [{**WELL, **parts}, {**WELL, "reward/c d/mean": 1.0}])
    assert screen.count("a part of the reward is called") == 1
    assert 'a part of the reward is called "\\x1b]0;owned\\x07": it counts in the reward, but is not a metric' in screen
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [[name for name in row if name.endswith("/mean") and name.count("/") == 2] for row in rows] == [
        ["reward/good/mean"],
        [],
    ]


def test_the_first_step_of_a_run_is_told_once(tmp_path: Path) -> None:
    told = "warning: 64 of the 64 responses were cut at rollout.max_response_tokens=48: raise it"
    assert record(tmp_path, 0, [{**CUT, "reward/judged": 64.0}] * 3).count(told) == 1
    assert told not in record(tmp_path, 3, [CUT] * 2)


def test_on_gpus_the_steps_that_compile_have_no_mfu_and_no_slow_rank(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("bapo_megatron.monitor.record.device_peak_flops", lambda dtype: 4e12)
    times = {"time/score_s": 0.0, "time/train_s": 1.0, "time/forward_s": 0.3, "time/optimizer_s": 0.1}
    row = {**WELL, **times, **straggler_metrics([1, 1, 9]), "train/tokens": 8.0, "perf/tflop": 4.0}  # of two ranks
    screen = record(tmp_path, 0, [row] * 4)
    assert "the first 2 steps also compile kernels for the GPU" in screen
    assert "is slow" not in screen
    assert [r.get("perf/mfu") for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [None, None, 0.5, 0.5]
    assert "trainer rank 2 is slow" in record(tmp_path, 4, [row] * 5), "three steps after the two of its attempt"


def test_an_alarm_is_told_once_on_the_terminal_and_kept_in_status_json(tmp_path: Path) -> None:
    screen = record(tmp_path, 0, [CUT] * 8)
    rule = next(rule for rule in RULES if rule.name == "all responses cut")
    saw = "every response of the last 5 steps was cut off at rollout.max_response_tokens."
    lines = [line[10:] for line in screen.splitlines()]
    at = lines.index(f"warning: all responses cut, step 5: {saw}")
    assert lines[at + 1 : at + 3] == [f"  usual cause: {rule.cause}", f"  change: {rule.change}"]
    assert screen.count("warning: ") == 2, "the first step has said it before"
    status = status_of(tmp_path)
    assert (status["state"], status["attempt"], status["step"], status["planned_steps"]) == ("finished", 1, 8, 20)
    told = {"saw": saw, "cause": rule.cause, "change": rule.change}
    assert status["alarms"] == [{"name": rule.name, "first_step": 5, "last_step": 8, "num_steps": 4, **told}]


def test_the_summary_counts_every_alarm_of_the_run(tmp_path: Path) -> None:
    record(tmp_path, 0, [CUT] * 8 + [{**WELL, "mismatch/alarms": 1.0}])
    screen = record(tmp_path, 9, [WELL] * 12)
    *_, cut, mismatch = screen.splitlines()
    assert cut.endswith("alarms     all responses cut at 4 steps, from 5 to 8")
    assert mismatch.endswith("alarms     mismatch at step 9")


def test_the_next_attempt_tells_again_and_keeps_the_first_step(tmp_path: Path) -> None:
    record(tmp_path, 0, [CUT] * 8)
    screen = record(tmp_path, 6, [CUT] * 2 + [WELL] * 4)
    assert screen.count("warning: all responses cut, step 5: ") == 1
    status = status_of(tmp_path)
    assert (status["attempt"], status["step"]) == (2, 12)
    assert [(a["first_step"], a["last_step"]) for a in status["alarms"]] == [(5, 8)], "it is over, and kept"


def test_steps_that_a_resume_repeats_raise_no_alarm(tmp_path: Path) -> None:
    record(tmp_path, 0, [CUT] * 8)
    record(tmp_path, 3, [WELL])
    assert status_of(tmp_path)["alarms"] == []


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (NoGroupKeptError("160 groups in a row were dropped (keep_group): choose others"), "no group kept"),
        (DivergedError("the last 20 updates were skipped: lower it"), "skipped updates"),
        (UserError("the disk is full"), None),
    ],
)
def test_an_error_that_ends_a_run_may_be_an_alarm(tmp_path: Path, error: UserError, name: str | None) -> None:
    record(tmp_path, 0, [WELL] * 2, error)
    status = status_of(tmp_path)
    found = [(alarm["name"], alarm["first_step"], alarm["saw"]) for alarm in status["alarms"]]
    assert found == ([(name, 3, f"{str(error).partition(':')[0]}.")] if name else [])
    assert status["state"] == "failed"


def test_a_disk_without_room_for_the_status_ends_nothing(tmp_path: Path) -> None:
    config = load_config(["demo"], [f"run.dir={tmp_path}", "run.name=run"])
    with RunDir.open(config) as run_dir:
        before = status_of(tmp_path)
        with full_disk(10):
            run_dir.write_status(step=3)
        assert status_of(tmp_path) == before, "the old one stays whole"
        (tmp_path / "run" / "status.json").write_text('{"state": "trai')
        run_dir.mark("training", step=4)
        assert (status_of(tmp_path)["state"], status_of(tmp_path)["step"]) == ("training", 4)


def test_ranks_other_than_the_first_leave_the_status_to_it(tmp_path: Path) -> None:
    config = load_config(["demo"], [f"run.dir={tmp_path}", "run.name=run"])
    with RunDir.open(config) as run_dir:
        run_dir.mark("failed", rank=1)
        assert run_dir.state == "failed"
        assert status_of(tmp_path)["state"] == "starting"


# the advice


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_an_alarm_names_settings_metrics_and_alarms_that_exist(rule: Rule) -> None:
    advice = f"{rule.cause} {rule.change}"
    settings = set(re.findall(r"([a-z]+)\.([a-z0-9_]+)", advice)) - {("samples", "jsonl")}
    assert settings <= schema().keys()
    assert set(re.findall(r"[a-z]+/[a-z_]+", advice)) <= METRICS.keys()
    assert set(rule.unless) <= {other.name for other in RULES}


def test_a_history_with_every_metric_that_a_report_draws_has_no_alarm_of_a_lasting_state(tmp_path: Path) -> None:
    run = read_history(make_run(tmp_path / "run", [plain(i) for i in range(1, 31)]))
    assert AlarmLog(run.rows).raised == []
    assert [alarm.name for alarm in AlarmLog([step(1)]).raised] == ["mismatch"], "its limit was passed"
