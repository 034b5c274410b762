"""Advantages from a teacher, against the formula written as a loop."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapo_megatron.algorithms.teacher import teacher_advantages
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.buffer.packing import Pass, Share
from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError, UserError
from bapo_megatron.learner.whole_batch import Scorer, taught, with_scores
from bapo_megatron.metrics import METRICS
from bapo_megatron.prompts import build_source
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.tokens import TEACHER_LOGPROBS, TokenStream
from bapo_megatron.types import Batch, Ended, Group, Prompt, Sample, Segment

ONE_RANK: Any = SimpleNamespace(share=Share(), sum_over_data_ranks=lambda table: table)


def batch_of(seed: int, *, kind: str) -> Batch:
    """Return sequences of several turns each, with masked tokens, and a teacher's log-probs."""
    draw = random.Random(seed)
    lengths, sampled, mask = [], [], []
    for _ in range(draw.randint(1, 6)):
        of_sequence: list[bool] = []
        for _ in range(draw.randint(1, 3)):
            of_sequence += [False] * draw.randint(1, 4) + [True] * draw.randint(1, 9)
        is_trained = draw.random() < 0.8
        lengths.append(len(of_sequence))
        sampled += of_sequence
        mask += [one and is_trained and draw.random() < 0.9 for one in of_sequence]
    if not any(mask):
        mask[sampled.index(True)] = True
    sampled_T = torch.tensor(sampled)

    def values(least: float, most: float) -> torch.Tensor:
        return torch.where(sampled_T, torch.tensor([draw.uniform(least, most) for _ in sampled]), 0.0)

    return Batch(
        token_ids_T=torch.arange(len(sampled)),
        seq_lens_S=torch.tensor(lengths),
        sampled_T=sampled_T,
        advantages_T=values(-2, 2) * (kind != "teacher"),
        behaviour_logprobs_T=values(-8, 0),
        versions_T=torch.where(sampled_T, 0, -1),
        mask_T=torch.tensor(mask),
        extra={TEACHER_LOGPROBS: values(-30, 0)},
    )


@pytest.mark.parametrize("kind", ["teacher", "grpo"])
def test_advantages_and_metrics_equal_the_formula(kind: str) -> None:
    for seed in range(200):
        batch, coef = batch_of(seed, kind=kind), random.Random(seed).choice([0.3, 1.0, 2.5])
        config = Config.model_validate(
            {
                "advantage": {"kind": kind},
                "teacher": {"path": "x", "coef": coef},
                "train": {"max_tokens_per_microbatch": random.Random(seed).choice([16, 40, 1000])},
            }
        )
        teacher, mu = (x.double().tolist() for x in (batch.extra[TEACHER_LOGPROBS], batch.behaviour_logprobs_T))
        gaps = [coef * (t - m) for t, m in zip(teacher, mu, strict=True)]
        exact_T = teacher_advantages(batch.extra[TEACHER_LOGPROBS], batch.behaviour_logprobs_T, coef)
        assert exact_T.tolist() == pytest.approx(gaps, abs=1e-9)
        got = taught(batch, [Pass(Share(), config.train.max_tokens_per_microbatch)], ONE_RANK, config)
        expected = [
            before + gap if is_sampled else 0.0
            for before, gap, is_sampled in zip(batch.advantages_T.tolist(), gaps, batch.sampled_T.tolist(), strict=True)
        ]
        assert got.advantages_T.dtype == torch.float32
        assert got.advantages_T.tolist() == torch.tensor(expected, dtype=torch.float64).float().tolist()
        trained = [gap for gap, is_trained in zip(gaps, batch.mask_T.tolist(), strict=True) if is_trained]
        mean = math.fsum(trained) / len(trained)
        assert got.metrics["teacher/kl"] == pytest.approx(-mean / coef, abs=1e-9)
        spread = math.sqrt(math.fsum((gap - mean) ** 2 for gap in trained) / len(trained))
        assert got.metrics["teacher/advantage_std"] == pytest.approx(spread, abs=1e-7)


def served(**teacher: Any) -> Config:
    return Config.model_validate(
        {"teacher": {"urls": ["http://x:1"], "coef": 0.3, **teacher}, "loss": {"name": "grpo"}}
    )


def test_tokens_that_a_server_has_not_scored_learn_nothing_from_it_and_do_not_count() -> None:
    for seed in range(100):
        batch, draw = batch_of(seed, kind="grpo"), random.Random(seed)
        is_known_T = torch.tensor([draw.random() < 0.6 for _ in batch.sampled_T])
        rows_T = batch.extra[TEACHER_LOGPROBS]
        rows_T[~is_known_T] = TEACHER_LOGPROBS.filler
        gap_T = torch.where(is_known_T & batch.sampled_T, 0.3 * (rows_T - batch.behaviour_logprobs_T), 0.0)
        got = with_scores(batch, [], ONE_RANK, served())
        assert got.advantages_T.tolist() == pytest.approx((batch.advantages_T + gap_T).tolist(), abs=1e-5)
        trained = gap_T[is_known_T & batch.mask_T]
        if trained.numel():
            assert got.metrics["teacher/kl"] == pytest.approx(-float(trained.mean()) / 0.3, abs=1e-5)
            assert got.metrics["teacher/advantage_std"] == pytest.approx(float(trained.std(correction=0)), abs=1e-5)
    for none in (batch.having(TEACHER_LOGPROBS, TEACHER_LOGPROBS.new_tensor(len(rows_T))), replace(batch, extra={})):
        got = with_scores(none, [], ONE_RANK, served())
        assert got.advantages_T.tolist() == batch.advantages_T.tolist()
        assert all(math.isnan(got.metrics[name]) for name in ("teacher/kl", "teacher/advantage_std"))


def test_tokens_that_were_given_have_no_advantage_whatever_their_rows_hold() -> None:
    batch = batch_of(1, kind="teacher")
    for stream_T in (batch.extra[TEACHER_LOGPROBS], batch.behaviour_logprobs_T):
        stream_T[~batch.sampled_T] = math.nan
    advantages_T = taught(batch, [Pass(Share(), 1000)], ONE_RANK, Config()).advantages_T
    assert advantages_T[batch.sampled_T].isfinite().all()
    assert not advantages_T[~batch.sampled_T].any()


def test_a_batch_without_trained_tokens_stays_as_it_is() -> None:
    batch = batch_of(2, kind="grpo")
    batch.mask_T[:] = False
    scorer = Scorer(TEACHER_LOGPROBS, ONE_RANK, lambda whole: [])
    assert with_scores(batch, [scorer], ONE_RANK, Config()) is batch


def test_nobody_else_may_use_the_streams_name() -> None:
    for check in ("check_computed", "check_annotated", "check_kept"):
        with pytest.raises(ValueError, match="the name is taken"):
            getattr(TokenStream("teacher_logprobs", "float32"), check)([])


# a run without a judge


ALONE = ("advantage.kind=teacher", "teacher.path=study", "loss.name=grpo", "reward.kind=none")
PROMPT = Prompt(3, (1, 2), "3+5=", None, "jsonl")


def group(rewards: Sequence[float]) -> Group:
    samples = [
        Sample.of(f"3.{i}", PROMPT, [Segment.sampled(0, 0, (5,) * (i + 1), (-1.0,) * (i + 1))], Ended("stop", reward))
        for i, reward in enumerate(rewards)
    ]
    return Group(PROMPT, tuple(samples))


@pytest.mark.parametrize(("kind", "rewards"), [("none", [0.0, 0.0, 0.0]), ("chains", [0.0, 1.0, 1.0])])
def test_a_teacher_alone_takes_no_advantage_from_rewards(kind: str, rewards: list[float]) -> None:
    config = Config.model_validate(
        {"advantage": {"kind": "teacher"}, "teacher": {"path": "x"}, "reward": {"kind": kind}}
    )
    batch = BatchBuilder(config).build([group(rewards)], {"reward/judged": 3.0, "rollout/num_dropped_groups": 0.0})
    assert not batch.advantages_T.any()
    of_rewards = {"reward/mean", "reward/std", "reward/judged", "rollout/zero_variance_share"}
    assert {*batch.metrics} & of_rewards == (set() if kind == "none" else of_rewards)
    assert batch.metrics["rollout/num_samples"] == 3.0
    assert {*batch.metrics} <= {*METRICS}


def test_each_sequence_has_the_teacher_of_its_source() -> None:
    """Two of three sources share a teacher; a sequence without a sampled token is left out, as elsewhere."""
    sources = [{"name": name, "source": "chains"} for name in "abc"]
    settings: dict[str, Any] = {"data": {"sources": sources}, "loss": {"name": "grpo"}}

    def built(by_source: dict[str, str], names: Sequence[str]) -> list[int] | None:
        config = Config.model_validate(settings | {"teacher": {"path_by_source": by_source}})
        groups = []
        for name in names:
            one, prompt = group([0.0, 1.0, 0.5]), replace(PROMPT, source=name)
            empty = Sample.of("3.9", prompt, (), Ended("stop", 0.0))
            samples = (empty, *(replace(sample, prompt=prompt) for sample in one.samples))
            groups.append(Group(prompt, samples))
        batch = BatchBuilder(config).build(groups, {})
        return None if batch.teacher_S is None else batch.teacher_S.tolist()

    assert built({"a": "x", "b": "y", "c": "x"}, "cba") == [0] * 3 + [1] * 3 + [0] * 3
    assert built({"a": "x", "b": "x", "c": "x"}, "cba") is None
    with pytest.raises(UserError, match=r"teacher\.path_by_source has no model for other, the source of some prompts"):
        built({"a": "x", "b": "y"}, ["a", "other"])


def test_nobody_judges() -> None:
    with RewardScorer(load_config(["demo"], ALONE)) as scorer:
        assert scorer.score([(PROMPT, "3+5=8,"), (PROMPT, "")]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"prompt": "3+5="}, "plain"),
        ({"messages": [{"role": "user", "content": "3+5="}]}, "plain"),
        ({"problem": "3+5?"}, "math"),
    ],
)
def test_rows_need_no_answer(tmp_path: Path, row: dict[str, Any], format: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"answer": "8"}) + "\n")
    data = ("data.source=jsonl", f"data.path={file}", f"data.format={format}")
    source = build_source(load_config(["demo"], (*ALONE, *data)))
    assert [source[i].answer for i in range(2)] == [None, "8"]
    with pytest.raises(DataError, match=r"field 'answer'.* is missing"):
        build_source(load_config(["demo"], data))
    with pytest.raises(DataError, match=r"field 'solution', which data\.fields\.answer names, is missing"):
        build_source(load_config(["demo"], (*ALONE, *data, 'data.fields={answer="solution"}')))


def test_an_evaluation_needs_a_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "demo", "reward.kind=none", "--output", str(tmp_path / "out")]) == 2
    assert 'reward.kind="none" gives no reward to measure; name a judge' in capsys.readouterr().err
