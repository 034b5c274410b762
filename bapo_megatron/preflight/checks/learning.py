"""Checks of the updates: the loss and its KL term, the learning rate, the critic."""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.lr_schedule import LARGE_RATE, planned_updates
from bapo_megatron.config.schema import TEACHERS, Config
from bapo_megatron.config.schema_loss import SelectingLoss
from bapo_megatron.errors import plural
from bapo_megatron.hf.facts import ModelFacts

TEACHER = tuple(f"teacher.{name}" for name in TEACHERS)
"""The settings that name a teacher."""


def check_loss(config: Config) -> Iterator[Violation]:
    """Check the loss against the updates of a step."""
    loss, train = config.loss, config.train
    if loss.scores_proximal and train.minibatches_per_step * train.epochs_per_step == 1:
        yield warning(
            ("train.minibatches_per_step", "train.epochs_per_step", "loss.proximal"),
            'loss.proximal="learner" clips the ratio to the weights at the start of the step, which is 1 in its only '
            "update: nothing is ever clipped",
            "set train.minibatches_per_step=2 or more to let the bounds act",
        )
    num_sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if loss.reads_responses and num_sequences == train.minibatches_per_step:
        yield warning(
            ("loss.name", "train.minibatches_per_step", "rollout.prompts_per_step", "rollout.samples_per_prompt"),
            f'loss.name="{loss.name}" weights or masks whole responses, and each update has one response: Adam cancels '
            "the weight, and a mask leaves nothing",
            f"set train.minibatches_per_step below {num_sequences}, so that an update has several responses",
        )
    if config.loss.searches_bounds and config.bapo.scope == "microbatch":
        yield warning(
            ("bapo.scope", "loss.name", "loss.search_bounds"),
            'bapo.scope="microbatch" gives every micro-batch its own bounds, as the authors\' recipe does: results '
            f"depend on train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch} and on the number of "
            "data and context ranks",
            'set bapo.scope="exact" to avoid this',
        )
    bapo = config.bapo
    name = "low" if bapo.order == "high_first" else "high"  # the last to move: Algorithm 1 moves neither without it
    if config.searches_bounds and len(getattr(bapo, name).points) == 1:
        change = 'set bapo.preset="default"' if bapo.preset == "wide" else f"raise bapo.{name}.stop"
        yield warning(
            ("bapo.low", "bapo.high", "bapo.order", "bapo.scope", "bapo.preset", "loss.name", "loss.search_bounds"),
            f"the search of [bapo] has no room: the bounds stay at {bapo.low.start:g} and {bapo.high.start:g}",
            f'{change}, or set bapo.scope="fixed" if that is meant',
        )


def check_share(config: Config) -> Iterator[Violation]:
    """Refuse a share of the update's tokens that is below one token."""
    loss, r, num_updates = config.loss, config.rollout, config.train.minibatches_per_step
    if not isinstance(loss, SelectingLoss):
        return
    num_tokens = -(-r.prompts_per_step * r.samples_per_prompt // num_updates) * r.max_response_tokens
    if loss.share * num_tokens < 1 - 1e-6:
        yield Violation(
            (
                "loss.share",
                "loss.name",
                "rollout.prompts_per_step",
                "rollout.samples_per_prompt",
                "rollout.max_response_tokens",
                "train.minibatches_per_step",
            ),
            f"loss.share={loss.share:g} selects no token: an update has at most {num_tokens} tokens",
            f"set loss.share={10 / num_tokens:.1g} or so, or make updates larger",
        )


def check_units(config: Config, given: Collection[str] | None) -> Iterator[Violation]:
    """Warn of values in another framework's unit: an epsilon, a number of sequences, a size of mini-batches."""
    train, loss = config.train, config.loss
    low = getattr(loss, "clip_low", 1.0)  # 0 means none
    if 0 < low < _LOW_BOUND:
        yield warning(
            ("loss.clip_low", "loss.name"),
            f"loss.clip_low={low:g} is a bound of the ratio: a token is clipped once its probability has fallen to "
            f"{low:g} of what it was",
            f"for an epsilon of {low:g}, set loss.clip_low={1 - low:g}",
        )
    pack, longest = train.max_tokens_per_microbatch * config.parallel.context, config.longest_trained
    if pack < longest and (given is None or "train.max_tokens_per_microbatch" in given):
        yield warning(
            (
                "train.max_tokens_per_microbatch",
                "parallel.context",
                "data.max_prompt_tokens",
                "rollout.max_response_tokens",
            ),
            f"train.max_tokens_per_microbatch={train.max_tokens_per_microbatch} counts tokens, not sequences, and the "
            f"longest sequence has {longest}: a longer one than this gets its own micro-batch",
            f"set it to {longest} or more, such as {4 * longest} for four sequences",
        )
    num_sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if config.parallel.data == 1 and 1 < train.minibatches_per_step == num_sequences:
        yield warning(
            ("train.minibatches_per_step", "parallel.data", "rollout.prompts_per_step", "rollout.samples_per_prompt"),
            f"train.minibatches_per_step={train.minibatches_per_step} is a number of updates, not the size of one: "
            f"each of the step's {num_sequences} sequences is an update of its own",
            "set it to the step's sequences, divided by the size that you want",
        )


_LOW_BOUND = 0.5  # below it, a lower bound is more likely an epsilon: usual bounds are 0.6 to 0.9997


def check_kl(config: Config) -> Iterator[Violation]:
    """Check the settings of the KL term."""
    loss = config.loss
    if not loss.kl_coef:
        if loss.kl_target is not None:
            yield Violation(
                ("loss.kl_coef", "loss.kl_target"),
                f"loss.kl_target={loss.kl_target:g} multiplies loss.kl_coef, which is 0 and would stay 0",
                "set loss.kl_coef=0.1, or leave loss.kl_target out",
            )
        return
    if loss.kl_estimator == "k1":
        yield warning(
            ("loss.kl_estimator", "loss.kl_coef"),
            'loss.kl_estimator="k1" has a gradient of 0 on average on samples of the policy itself: as a term of the '
            "loss it adds noise and does not restrain the policy",
            'set loss.kl_estimator="k2" or "k3"',
        )


def check_schedule(config: Config, given: Collection[str] | None) -> Iterator[Violation]:
    """Check the size of the learning rate, and that warm-up ends before the run does."""
    optimizer, num_updates = config.optimizer, planned_updates(config)
    rates: dict[tuple[str, ...], float] = {("optimizer.lr",): optimizer.lr}
    if not config.advantage.compares_responses:
        rates["critic.lr", "advantage.kind"] = config.critic.lr
    for settings, rate in rates.items():
        if rate >= LARGE_RATE:
            setting = settings[0]
            yield warning(
                settings,
                f"{setting}={rate:g}: an update of Adam moves each weight by about the learning rate, and a model's "
                f"weights are about {LARGE_RATE:g} in size, so the first updates replace it",
                f"set {setting}=1e-6 for a large model, or 1e-4 for a small one",
            )
    if optimizer.warmup_updates < num_updates:
        return
    settings = (
        "optimizer.warmup_updates",
        "optimizer.schedule",
        "optimizer.total_updates",
        "train.num_steps",
        "train.minibatches_per_step",
        "train.epochs_per_step",
        "train.rollout_only",
    )
    remedy = f"set optimizer.warmup_updates={num_updates // 10} or so"
    if optimizer.schedule == "constant":
        is_given = given is None or "optimizer.warmup_updates" in given  # if not, this is a short trial of a recipe
        if is_given and optimizer.warmup_updates > num_updates and not config.train.rollout_only:
            yield warning(
                settings,
                f"optimizer.warmup_updates={optimizer.warmup_updates} is longer than the run of "
                f"{plural(num_updates, 'update')}, which ends at {num_updates / optimizer.warmup_updates:.2g} of "
                "optimizer.lr",
                remedy,
            )
    else:
        yield Violation(
            settings,
            f"optimizer.warmup_updates={optimizer.warmup_updates} leaves nothing of the "
            f'{plural(num_updates, "update")} for optimizer.schedule="{optimizer.schedule}"',
            remedy,
        )


def check_advantage(config: Config) -> Iterator[Violation]:
    """Find settings for groups, or for whole responses, that the advantage cannot use."""
    advantage, r = config.advantage, config.rollout
    if advantage.whiten_batch and (advantage.whitens == "tokens" or not advantage.compares_responses):
        yield Violation(
            ("advantage.whiten_batch", "advantage.kind"),
            f'advantage.whiten_batch=true whitens over responses, and advantage.kind="{advantage.kind}" over tokens',
            "leave it out",
        )
    if r.keep_group == "informative" and not (advantage.needs_group and not config.teacher.given):
        cost = "are all there are" if r.samples_per_prompt == 1 else "teach as much as others"
        method = "a teacher" if advantage.needs_group else f'advantage.kind="{advantage.kind}"'
        yield Violation(
            ("rollout.keep_group", "rollout.samples_per_prompt", "advantage.kind", *TEACHER),
            f'rollout.keep_group="informative" leaves out groups of equal rewards, which {cost} with '
            f"rollout.samples_per_prompt={r.samples_per_prompt} and {method}",
            'set rollout.keep_group="all"',
            "error" if r.samples_per_prompt == 1 else "warning",
        )


def check_critic(config: Config) -> Iterator[Violation]:
    """Find a critic whose warm-up lasts for the whole run, and responses that it does not learn from."""
    train, num_warm = config.train, config.critic.warmup_steps
    if config.advantage.compares_responses:
        return
    if num_warm >= train.num_steps and not train.rollout_only:
        yield warning(
            ("train.num_steps", "critic.warmup_steps", "advantage.kind", "train.rollout_only"),
            f"critic.warmup_steps={num_warm} of train.num_steps={train.num_steps} steps train only the critic: the "
            "policy would never change",
            "set train.num_steps above it",
        )
    if config.rollout.truncated == "mask":
        yield warning(
            ("rollout.truncated", "advantage.kind"),
            'rollout.truncated="mask": the critic does not learn from truncated responses either, and so predicts the '
            "rewards of complete responses only",
            'set rollout.truncated="keep"',
        )


def _check_teacher_of_each(
    table: str, what: str, named: Mapping[str, Sequence[str]], sources: Set[str]
) -> Iterator[Violation]:
    settings = (table, "data.sources")
    if not sources:
        yield Violation(
            settings,
            f"{table} names {what}s for entries of data.sources, and there are none",
            f"set {table.removesuffix('_by_source')} instead",
        )
        return
    if lacking := sorted(sources - {name for name, values in named.items() if values}):
        problem = f"{table} has no {what} for {lacking[0]} of data.sources"
        yield Violation(settings, problem, f"name one: {table}.{lacking[0]}")
    if unknown := sorted(named.keys() - sources):
        problem = f"{table} has {unknown[0]}, which data.sources does not name"
        yield Violation(settings, problem, f"leave it out; the sources are {', '.join(sorted(sources))}")


def check_centering(config: Config, vocab_size: int | None) -> Iterator[Violation]:
    """Check that the sampler's likeliest tokens are of the distribution that the loss's ratio compares with.

    Args:
        vocab_size: the policy's; None if it is unknown.
    """
    if not (top_k := config.loss.sampler_top_k):
        return
    name, without = f"loss.center_top_k={top_k}", "or loss.center_top_k=0"
    if config.loss.scores_proximal:
        yield Violation(
            ("loss.proximal", "loss.center_top_k"),
            f'loss.proximal="learner" with {name}: the ratio compares with the learner at the start of the step, and '
            "the sampler's likeliest tokens say nothing of that",
            f'set loss.proximal="behaviour", {without}',
        )
    if config.rollout.is_cut:
        yield Violation(
            ("rollout.top_p", "rollout.top_k", "loss.center_top_k"),
            f"rollout.top_p or rollout.top_k with {name}: servers return the likeliest tokens before the cut",
            f"set rollout.top_p=1 and leave rollout.top_k out, {without}",
        )
    if config.teacher.top_k:
        yield Violation(
            ("teacher.top_k", "loss.center_top_k"),
            f"teacher.top_k={config.teacher.top_k} with {name}: an update reads one list of tokens at each place",
            "leave one of them out",
        )
    if vocab_size is not None and top_k >= vocab_size:
        yield Violation(
            ("loss.center_top_k", "model.path"),
            f"{name}, but the vocabulary has {vocab_size} tokens",
            f"set it to {vocab_size - 1} or less",
        )


def check_teacher(config: Config) -> Iterator[Violation]:
    """Check that a teacher is there where it must be, and what its advantages or its divergence mean for the update."""
    advantage, teacher = config.advantage, config.teacher
    if teacher.top_k and not teacher.paths:
        yield Violation(
            ("teacher.path", "teacher.path_by_source", "teacher.top_k"),
            f"teacher.top_k={teacher.top_k} needs teacher.path: the trainer finds the teacher's likeliest tokens",
            "set it, or leave teacher.top_k out",
        )
    if not teacher.given:
        if not advantage.reads_rewards:
            yield Violation(
                (*TEACHER, "advantage.kind"),
                'advantage.kind="teacher" needs teacher.path, the model to learn from, or teacher.urls or teacher.hint',
                'set one, or advantage.kind="grpo"',
            )
        return
    if not advantage.compares_responses:
        yield Violation(
            (*TEACHER, "advantage.kind"),
            f'{teacher.given} with advantage.kind="{advantage.kind}": a critic values rewards, and the advantages that '
            "follow are not added to a teacher's",
            'set advantage.kind="teacher" to learn from the teacher alone, or "grpo" to add its advantage',
        )
    has_advantages = not teacher.top_k
    if config.searches_bounds and (has_advantages or not advantage.reads_rewards):
        yield warning(
            ("loss.name", "bapo.scope", *TEACHER),
            "a teacher's advantages are negative on average, by the KL divergence, and so the search of [bapo] ends at "
            "its limits in nearly every update"
            if has_advantages
            else 'with teacher.top_k and advantage.kind="teacher" there are no advantages for the search of [bapo]',
            'set loss.name="grpo", whose bounds are fixed, or bapo.scope="fixed"',
        )
    if config.rollout.is_cut and has_advantages:
        yield warning(
            ("rollout.top_p", "rollout.top_k", *TEACHER),
            "with rollout.top_p or rollout.top_k, the sampler's log-probs cover the tokens that it may choose, and the "
            "teacher's all tokens: they make each advantage too low",
            "set rollout.top_p=1, and leave rollout.top_k out",
        )
    if teacher.is_served and config.rollout.temperature != 1:
        yield Violation(
            ("rollout.temperature", *TEACHER),
            f"rollout.temperature={config.rollout.temperature:g} with {teacher.given}: servers score at temperature 1, "
            "whatever they are asked for, and the sampler's log-probs are at the run's",
            "set rollout.temperature=1, or let the trainer hold the teacher (teacher.path)",
        )
    tables = (("path", "model", teacher.path_by_source), ("urls", "server", teacher.urls_by_source))
    for name, what, table in tables:
        if table:
            sources = {one.name for one in config.data.sources}
            yield from _check_teacher_of_each(f"teacher.{name}_by_source", what, table, sources)
    if teacher.hint is not None and config.environment.is_agent:
        yield Violation(
            ("teacher.hint", "environment.kind"),
            'teacher.hint replaces the words of a row, and with environment.kind="agent" a program writes the prompts',
            "leave one of them out, or name a teacher by teacher.path or teacher.urls",
        )


def check_positions(config: Config, setting: str, path: str, model: ModelFacts) -> Iterator[Violation]:
    """Check that a model that scores the policy's sequences has positions for the longest one."""
    longest = config.longest_trained
    if not model.problems and longest > model.shape.max_positions:
        yield Violation(
            (setting, "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"{setting}={path!r} has max_position_embeddings={model.shape.max_positions}, and the longest sequence "
            f"that it may score has {longest} tokens",
            "set it to a model with more positions, or lower rollout.max_response_tokens",
        )
