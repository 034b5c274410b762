"""What `advantage.kind`, [critic] and the rest of the configuration say about each other: see plan.py."""

from __future__ import annotations

from collections.abc import Iterator

from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_advantage import CriticConfig
from bapo_megatron.config.violation import Violation


def check_critic(config: Config) -> Iterator[Violation]:
    """Settings of a critic that no advantage asks for, and groups that one does not need."""
    advantage, critic, r = config.advantage, config.critic, config.rollout
    if advantage.compares_responses:
        if changed := [name for name, default in CriticConfig() if getattr(critic, name) != default]:
            yield Violation(
                f'critic.{changed[0]} is set, but advantage.kind="{advantage.kind}" has no critic; set '
                f'advantage.kind="gae" or "n_step", or leave [critic] out'
            )
        return
    if advantage.whiten_batch:
        yield Violation(
            f'advantage.whiten_batch=true is for one advantage per response, and advantage.kind="{advantage.kind}" has '
            "one per token; set advantage.whiten_tokens instead"
        )
    if critic.warmup_steps >= config.train.num_steps and not config.train.rollout_only:
        yield Violation(
            f"critic.warmup_steps={critic.warmup_steps} of train.num_steps={config.train.num_steps} steps train the "
            "critic only: the policy would never change; set train.num_steps above it",
            "warning",
        )
    if r.zero_variance == "drop":
        cost = "are all there are" if r.samples_per_prompt == 1 else "teach a critic as much as others"
        yield Violation(
            f'rollout.zero_variance="drop" leaves out groups of equal rewards, which {cost} with '
            f'rollout.samples_per_prompt={r.samples_per_prompt} and advantage.kind="{advantage.kind}"; set '
            'rollout.zero_variance="keep"',
            "error" if r.samples_per_prompt == 1 else "warning",
        )
    if r.truncated == "mask":
        yield Violation(
            'rollout.truncated="mask": the critic does not learn from truncated responses either, so that its values '
            "are those of responses that come to an end",
            "warning",
        )
