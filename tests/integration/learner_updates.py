"""A few updates of a tiny policy, to compare settings that must not change the outcome."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.types import MiniBatch
from tests.distributed import HANG_S
from tests.integration.learner_reference import ADAM_EPS, BOUNDS, LR, TEMPERATURE, random_batch

NUM_UPDATES = 3
TOKENS = 40  # per micro-batch: an update has several


@dataclass
class Update:
    metrics: dict[str, float]
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def make_config(*, distributed: bool = False, train: dict[str, Any] | None = None, **sections: Any) -> Config:
    parallel = {"timeout_s": HANG_S, **sections.pop("parallel", {})}
    return Config.model_validate(
        {
            "rollout": {"temperature": TEMPERATURE},
            "optimizer": {"lr": LR, "eps": ADAM_EPS, "distributed": distributed},
            "train": {"logprob_chunk_tokens": 13, "max_tokens_per_microbatch": TOKENS, **(train or {})},
            "parallel": parallel,
            **sections,
        }
    )


def pack(learner: MegatronLearner) -> MiniBatch:
    minibatch = one_minibatch(random_batch(), max_tokens=TOKENS, share=learner.share)
    assert len(minibatch.micro_batches) > 1
    return minibatch


def updates_of(learner: MegatronLearner, *, read_between: bool = True) -> list[Update]:
    """Make NUM_UPDATES updates, each after a scoring pass; then leave the groups.

    Args:
        read_between: gather gradients and weights after every update, not only after the last one.
    """
    minibatch, found = pack(learner), []
    for number in range(NUM_UPDATES):
        learner.score(minibatch)
        result = learner.step(minibatch, BOUNDS)
        gradients, weights = {}, {}
        if read_between or number == NUM_UPDATES - 1:
            gradients = {name: gradient.clone() for name, gradient in learner.named_gradients()}
            weights = {name: weight.clone() for name, weight in learner.weights().whole()}
        found.append(Update(result.metrics, result.log_probs, gradients, weights))
    parallel_state.destroy_model_parallel()
    return found


def updates(config: Config, folder: Path) -> list[Update]:
    return updates_of(MegatronLearner(resolve(config, folder)))


def assert_close(got: list[Update], want: list[Update], *, rtol: float, atol: float) -> None:
    for mine, other in zip(got, want, strict=True):
        for field in ("metrics", "log_probs", "gradients", "weights"):
            torch.testing.assert_close(getattr(mine, field), getattr(other, field), rtol=rtol, atol=atol)
