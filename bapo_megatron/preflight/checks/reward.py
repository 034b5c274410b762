"""Checks of the judge, and of the shaping of its rewards."""

from collections.abc import Iterator

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.dotted import REWARD
from bapo_megatron.config.schema import Config, RewardConfig


def check_reward(config: Config) -> Iterator[Violation]:
    """Check the settings for judging and shaping against each other."""
    reward, r = config.reward, config.rollout
    if reward.overlong_buffer_tokens > r.max_response_tokens:
        yield Violation(
            ("reward.overlong_buffer_tokens", "rollout.max_response_tokens"),
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} is more than rollout.max_response_tokens="
            f"{r.max_response_tokens}: even an empty response would be punished",
            f"set reward.overlong_buffer_tokens={max(1, r.max_response_tokens // 5)}",
        )
    if r.truncated == "mask" and reward.overlong_penalty:
        yield warning(
            ("rollout.truncated", "reward.overlong_penalty"),
            'rollout.truncated="mask" keeps truncated responses out of the loss, so reward.overlong_penalty='
            f"{reward.overlong_penalty:g} has little effect",
            'set rollout.truncated="keep" or reward.overlong_penalty=0',
        )
    if r.keep_group == "informative" and r.samples_per_prompt == 2:
        yield warning(
            ("rollout.samples_per_prompt", "rollout.keep_group"),
            'rollout.keep_group="informative" with rollout.samples_per_prompt=2 drops most groups: two responses often '
            "get the same reward",
            'set rollout.samples_per_prompt=8, or rollout.keep_group="all"',
        )
    if r.keep_group == "informative" and config.train.entropy_coef:
        yield warning(
            ("rollout.keep_group", "train.entropy_coef"),
            f"train.entropy_coef={config.train.entropy_coef:g} rewards entropy on groups of equal rewards too, and "
            'rollout.keep_group="informative" leaves these out of the batch',
            'set rollout.keep_group="all"',
        )
    if reward.overlong_penalty and config.advantage.needs_binary:
        yield Violation(
            ("advantage.kind", "reward.overlong_penalty"),
            f'advantage.kind="{config.advantage.kind}" needs rewards of 0 and 1, and reward.overlong_penalty='
            f"{reward.overlong_penalty:g} makes others of them",
            'set reward.overlong_penalty=0 or advantage.kind="grpo"',
        )
    if config.advantage.reads_parts and config.has_judge and not (reward.judges or reward.weights):
        yield Violation(
            ("advantage.kind", "reward.judges", "reward.weights", "reward.kind", "environment.kind"),
            f'advantage.kind="{config.advantage.kind}" needs rewards with parts, and the judge gives one number',
            'set reward.judges, such as {correct = "math", format = "my_rewards:has_box"}, or reward.weights for the '
            "parts that a judge of yours returns",
        )
    if not reward.is_given:
        yield from _without_judge(config)
    yield from _parts(reward)
    for table, one in config.prompt_sources.items():
        if reward.kind == "code" and not one.has_rows:
            yield Violation(
                (f"{table}.source", "reward.kind", "data.sources"),
                f'reward.kind="code" needs prompts with tests, but {table}.source={one.source!r} has none',
                f'set {table}.source="jsonl"',
            )
    is_scaled = reward.scale != 1 or reward.running_std
    scaling = ("advantage.kind", "reward.scale", "reward.running_std", "reward.clip")
    if config.advantage.divides_by_group and is_scaled and reward.clip is None:
        name = "reward.running_std" if reward.running_std else f"reward.scale={reward.scale:g}"
        yield warning(
            scaling,
            f'{name} does nothing with advantage.kind="{config.advantage.kind}", which divides by a '
            "statistic of each group's rewards",
            'set advantage.kind="dr_grpo" or "rloo"',
        )
    if config.advantage.whitens and is_scaled and reward.clip is None and not config.advantage.divides_by_group:
        name = "whiten_batch=true" if config.advantage.whiten_batch else f'kind="{config.advantage.kind}"'
        yield warning(
            ("advantage.whiten_batch", *scaling),
            f"advantage.{name} divides by the standard deviation of the batch, so that reward.scale and "
            "reward.running_std do nothing",
            "leave one of them out",
        )


def _without_judge(config: Config) -> Iterator[Violation]:
    """Find what needs the rewards that `reward.kind = "none"` does not give."""
    needed: dict[tuple[str, ...], tuple[str, str]] = {}
    if config.advantage.reads_rewards:
        given = f'advantage.kind="{config.advantage.kind}" learns from rewards'
        needed["reward.kind", "advantage.kind"] = given, 'name a judge, or set advantage.kind="teacher"'
    if config.rollout.keep_group == "informative":
        given = 'rollout.keep_group="informative" leaves out groups of equal rewards'
        needed["rollout.keep_group", "reward.kind"] = given, 'set rollout.keep_group="all", or name a judge'
    if config.eval.interval_steps is not None:
        given = "eval.interval_steps measures rewards"
        needed["eval.interval_steps", "reward.kind"] = given, "leave it out, or name a judge"
    for settings, (what, remedy) in needed.items():
        yield Violation(settings, f'reward.kind="none" gives no reward, and {what}', remedy)


def _parts(reward: RewardConfig) -> Iterator[Violation]:
    """Check that judges give all the parts of the reward that have weights."""
    weights = ("reward.weights", "reward.judges", "reward.kind")
    if reward.judges and reward.kind != "auto":
        yield Violation(
            ("reward.kind", "reward.judges"),
            f'reward.kind="{reward.kind}" names a judge besides reward.judges',
            "make it one of them, or leave it out",
        )
    unknown = sorted(reward.weights.keys() - reward.judges.keys()) if reward.judges else []
    if unknown:
        names = ", ".join(reward.judges)
        yield Violation(
            weights, f"reward.weights.{unknown[0]} is not a part of reward.judges ({names})", "leave it out"
        )
    elif reward.weights and not reward.judges and reward.kind in REWARD.names:
        yield Violation(
            weights,
            f'reward.weights names parts, and reward.kind="{reward.kind}" returns a number',
            "leave it out, or set reward.judges",
        )
