"""Real steps with fewer sequences than data ranks x mini-batches: every layout makes the updates of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from bapo_megatron.buffer.packing import sequences_of
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.values import ValueAdvantages
from bapo_megatron.learner.whole_batch import policy_passes, policy_updates, scorers_of, with_likeliest, with_scores
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from tests.distributed import HANG_S, run_distributed
from tests.integration.learner_reference import ADAM_EPS, LR, random_batch, save_random_model

NUM_MINIBATCHES = 4
LENGTHS = ([7, 12, 5], [9])  # fewer than 2 ranks x 4 mini-batches
TEACHERS = {"a": "model", "b": "teacher"}
LOSSES: dict[str, dict[str, Any]] = {
    "bapo": {"bapo": {"scope": "exact"}, "advantage": {"kind": "gae"}, "critic": {"epochs_per_step": 2}},
    "gspo": {"loss": {"name": "gspo", "kl_coef": 0.1, "proximal": "learner", "max_drift": 0.5}},
    "m2po": {"loss": {"name": "m2po"}},
    "top_entropy": {"loss": {"name": "top_entropy", "share": 0.5}},
    "grpo": {"loss": {"name": "grpo"}, "teacher": {"path_by_source": TEACHERS, "coef": 0.5}},
    "likely": {"loss": {"name": "grpo"}, "teacher": {"path_by_source": TEACHERS, "top_k": 4}},
}
TOLERANCE = 1e-4


def dealt(batch: Batch, needed: list[torch.Tensor], data_rank: int) -> Batch:
    """Return the data rank's share, as `rollout/shares.py` deals it."""
    mine = batch.holding(needed[data_rank])
    for stream in (stream for stream in batch.values if stream.to != "every rank"):
        mine = mine.having(stream, mine.here(batch.values[stream]))
    return mine


def check_steps(rank: int, world_size: int, root: Path, cases: list[dict[str, Any]]) -> None:
    """Train a step on each small batch, in each layout and with each loss; compare the results by file."""
    for name, settings in LOSSES.items():
        for layout in cases:
            config = Config.model_validate(
                {
                    "parallel": {"timeout_s": HANG_S, **layout},
                    "optimizer": {"lr": LR, "eps": ADAM_EPS},
                    "train": {"minibatches_per_step": NUM_MINIBATCHES, "max_tokens_per_microbatch": 16},
                    **settings,
                }
            )
            of = config.teacher
            by_source = {source: str(root / path) for source, path in of.path_by_source.items()}
            config = config.model_copy(update={"teacher": of.model_copy(update={"path_by_source": by_source})})
            learner = MegatronLearner(resolve(config, root / "model"))
            advantages, finder = (
                ValueAdvantages(resolve(config, root / "model"), learner),
                BoundsFinder(config, learner),
            )
            scorers, found = scorers_of(config, learner, learner.reference, learner.teachers), []
            for step, lengths in enumerate(LENGTHS):
                whole = replace(random_batch(seq_lens=lengths), rewards_S=torch.linspace(0, 1, len(lengths)))
                whole = replace(whole, teacher_S=torch.arange(len(lengths)) % 2 if by_source else None)
                passes = advantages.passes(step) + policy_passes(config, step, learner, scorers)
                needed = sequences_of(passes, whole, learner.layout.data_size)
                batch = advantages.on(dealt(whole, needed, learner.layout.data_rank), step)
                found.append({n: x for n, x in batch.metrics.items() if n.startswith("critic/")})
                batch = with_scores(batch, scorers, learner, config)
                found.append({n: x for n, x in batch.metrics.items() if n.startswith("teacher/")})
                for one in policy_updates(config, step, learner.share).minibatches(batch):
                    minibatch = with_likeliest(one, batch, learner.teachers, config.teacher.top_k)
                    result = learner.step(minibatch, bounds := finder.find(minibatch))
                    finder.observe(minibatch, result.log_probs)
                    found.append({"low": bounds.low, "high": bounds.high} | result.metrics)
            assert learner.version == sum(min(len(lengths), NUM_MINIBATCHES) for lengths in LENGTHS)
            weights = {name: weight.clone() for name, weight in learner.weights().whole()}
            if rank == 0:
                compare(root / f"{name}.pt", found, weights, f"{name}, {layout}")
            parallel_state.destroy_model_parallel()


def compare(path: Path, found: list[dict[str, float]], weights: dict[str, torch.Tensor], what: str) -> None:
    """Keep the first layout's results, and compare the others with them."""
    assert all(bool(weight.isfinite().all()) for weight in weights.values()), what
    if not path.exists():
        torch.save((found, weights), path)
        return
    want, want_weights = torch.load(path, weights_only=True)
    for got, expected in zip(found, want, strict=True):
        assert got == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True), what
    for name, weight in weights.items():
        torch.testing.assert_close(weight, want_weights[name], rtol=TOLERANCE, atol=TOLERANCE, msg=what)


@pytest.mark.slow
def test_fewer_sequences_than_ranks_and_minibatches(tmp_path: Path) -> None:
    save_random_model("qwen3", tmp_path / "model")
    save_random_model("qwen2", tmp_path / "teacher")
    for name in TEACHERS.values():
        (tmp_path / name / "tokenizer.json").write_text("{}")  # a teacher is a complete model folder
    run_distributed(check_steps, 1, tmp_path, [{}])
    run_distributed(check_steps, 2, tmp_path, [{"data": 2}, {"pipeline": 2}, {"context": 2}])
    run_distributed(check_steps, 4, tmp_path, [{"data": 2, "pipeline": 2, "virtual_pipeline": 2}, {"data": 4}])
