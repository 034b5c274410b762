"""Checks across sections of what one update does: learning rate, KL term, rewards and advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bapo_megatron.algorithms.lr_schedule import planned_updates
from bapo_megatron.config.schema import Config
from bapo_megatron.config.violation import Violation


def check_learning(config: Config) -> Iterator[Violation]:
    """Settings that contradict each other, or that do nothing."""
    yield from _schedule(config)
    yield from _bounds(config)
    yield from _profile(config)
    yield from _kl(config)
    yield from _rewards(config)


def check_reference(config: Config, reference: dict[str, Any], policy: dict[str, Any]) -> Iterator[Violation]:
    """Whether the model of `loss.reference_path` can be compared with the policy, and split like it.

    Args:
        reference, policy: their config.json.
    """
    from bapo_megatron.learner.hf.shapes import validate_layout

    p, name = config.parallel, f"loss.reference_path={config.loss.reference_path!r}"
    if (size := reference.get("vocab_size")) != policy.get("vocab_size"):
        yield Violation(
            f"{name} has a vocabulary of {size} tokens, the policy one of {policy.get('vocab_size')}: log-probs of the "
            "same tokens cannot be compared; set it to a model of the policy's family, or leave it out"
        )
    for problem in validate_layout(reference, p.tensor, p.pipeline, p.virtual_pipeline):
        yield Violation(f"{name}: {problem}")


def _schedule(config: Config) -> Iterator[Violation]:
    optimizer, num_updates = config.optimizer, planned_updates(config)
    if optimizer.schedule == "constant":
        for name in ("min_lr_ratio", "total_updates"):
            if value := getattr(optimizer, name):
                yield Violation(
                    f'optimizer.{name}={value:g} does nothing with optimizer.schedule="constant"; set '
                    'optimizer.schedule="cosine", or leave it out',
                    "warning",
                )
    elif optimizer.warmup_updates >= num_updates:
        yield Violation(
            f"optimizer.warmup_updates={optimizer.warmup_updates} leaves nothing of the {num_updates} updates for "
            f'optimizer.schedule="{optimizer.schedule}"; set optimizer.warmup_updates={num_updates // 10} or so'
        )


def _bounds(config: Config) -> Iterator[Violation]:
    if config.loss.name == "bapo" and config.bapo.scope == "microbatch":
        yield Violation(
            'bapo.scope="microbatch" gives every micro-batch bounds of its own, as the authors\' recipe does: results '
            f"depend on train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch} and on the number of "
            'data and context ranks; set bapo.scope="exact" for results that do not',
            "warning",
        )


def _profile(config: Config) -> Iterator[Violation]:
    if config.monitor.token_profile and config.loss.name == "sft":
        yield Violation(
            'monitor.token_profile=true does nothing with loss.name="sft", which has neither ratios nor bounds; '
            "leave it out",
            "warning",
        )


def _kl(config: Config) -> Iterator[Violation]:
    loss = config.loss
    if not loss.kl_coef:
        if loss.kl_target is not None:
            yield Violation(
                f"loss.kl_target={loss.kl_target:g} multiplies loss.kl_coef, which is 0 and would stay so; set "
                "loss.kl_coef=0.1, or leave loss.kl_target out"
            )
        if loss.reference_path is not None:
            yield Violation(
                f"loss.reference_path={loss.reference_path!r} is not used without a KL term; set loss.kl_coef=0.001, "
                "or leave it out",
                "warning",
            )
        return
    if loss.kl_estimator == "k1":
        yield Violation(
            'loss.kl_estimator="k1" has a gradient of 0 on average, on samples of the policy itself: as a term of the '
            'loss it adds noise and holds nothing back; set loss.kl_estimator="k2" or "k3"',
            "warning",
        )


def _rewards(config: Config) -> Iterator[Violation]:
    reward = config.reward
    is_scaled = reward.scale != 1 or reward.running_std
    if config.advantage.kind == "grpo" and is_scaled and reward.clip is None:
        name = "reward.running_std" if reward.running_std else f"reward.scale={reward.scale:g}"
        yield Violation(
            f'{name} does nothing with advantage.kind="grpo", which divides by the standard deviation of each group; '
            'set advantage.kind="dr_grpo" or "rloo"',
            "warning",
        )
    if config.advantage.whiten_batch and is_scaled and reward.clip is None and config.advantage.kind != "grpo":
        yield Violation(
            "advantage.whiten_batch=true divides by the standard deviation of the batch, so that reward.scale and "
            "reward.running_std do nothing; leave one of them out",
            "warning",
        )
