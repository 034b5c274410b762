"""Alarms: signs in a run's metrics that it learns nothing, or learns from the wrong data, with cause and remedy.

`RULES` lists them. A rule looks at the steps so far and says what it saw. An `AlarmLog` takes the steps one by one and
keeps the alarms raised. The same rows give the same alarms, so a resumed run and a report need only metrics.jsonl.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, variance

from bapo_megatron.config.lr_schedule import LARGE_RATE
from bapo_megatron.config.schema import EnvironmentConfig
from bapo_megatron.errors import DivergedError, NoGroupKeptError, UserError
from bapo_megatron.estimates import Z_95
from bapo_megatron.runs.branching import branch_command, with_more_steps
from bapo_megatron.runs.history import text_of
from bapo_megatron.runs.numbers import percent
from bapo_megatron.runs.resuming import different_settings, steps_saved
from bapo_megatron.runs.steps import StepRow
from bapo_megatron.runs.summary import increases, is_pass_rate, reward_metric

_WINDOW_STEPS = 10
_MIN_STEPS_TO_JUDGE = 5
_MIN_RESPONSES_TO_JUDGE = 64
_MIN_EVALUATIONS = 5
_NEARLY_ALL = 0.95
_MIN_UPDATES = 3  # an occasional spike or skipped update is normal
_UPDATES_SHARE = 0.2
_CLIPPED_SHARE = 0.8  # the first update after a push, when the policy still equals the sampler, rarely clips everything
_ENTROPY_NATS = 0.005
_RISE_STEPS = (5, 15, 45)  # so that a doubling within 20 steps is seen as well as one within 150
_FALL_STDS = 0.1  # a smaller fall of the reward may be chance, which has a chance at each step
_RISE = 1.25  # in healthy runs, means of five steps differ by less, and other data raise at most two of four
_LOST_NATS = 1.0  # measured in the demo: below 0.3 at rates that learn, above it once the policy is destroyed
_KL_NATS = 1e-8  # float32 rounding causes about 1e-13
_OLD_TOKEN_UPDATES = 0.1  # with this mean age or more, a policy that moves must differ from the one that sampled
_ROUNDED_SHARE = 0.03  # measured in bfloat16: adapters of 1e-4 of the weights change as many values
_LR_SHARE = 0.1  # below this share of the peak rate, a policy may legitimately stand still
_SMALL_GAIN = 0.05
_HIGH_PASS_RATE = 0.9


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that fired, in three short sentences. `saw` describes the first step at which it fired."""

    name: str
    first_step: int
    last_step: int
    num_steps: int  # at which it fired
    saw: str
    cause: str
    change: str

    def count(self) -> str:
        """Return how often it fired, for the end of a run."""
        if self.num_steps == 1:
            return f"{self.name} at step {self.last_step}"
        return f"{self.name} at {self.num_steps} steps, from {self.first_step} to {self.last_step}"

    def text(self) -> str:
        """Return three lines for a terminal."""
        return f"{self.name}, step {self.first_step}: {self.saw}\n  usual cause: {self.cause}\n  change: {self.change}"


class Steps:
    """The steps of a run so far, as rules see them."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.recent: list[StepRow] = []
        self.before: StepRow = {}  # the step before the recent ones
        self.peak_lr = 0.0
        self.evaluations: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by metric: mean, standard error

    def add(self, row: StepRow) -> None:
        """Take in the next step."""
        self.rows.append(row)
        self.recent = self.rows[-_WINDOW_STEPS:]
        self.before = self.rows[-_WINDOW_STEPS - 1] if len(self.rows) > _WINDOW_STEPS else {}
        self.peak_lr = max(self.peak_lr, row.get("optimizer/lr", 0.0))
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith("/reward"):
                error = row.get(f"{name}_stderr", math.nan)
                if math.isfinite(value) and math.isfinite(error):
                    self.evaluations[name].append((value, error))

    @property
    def latest(self) -> StepRow:
        return self.rows[-1]

    def values(self, name: str) -> list[float]:
        """Return the finite values of a metric in the recent steps."""
        return _finite(self.recent, name)

    def always(self, test: Callable[[StepRow], bool]) -> bool:
        """Return whether there are at least five recent steps and all pass a test; nan must fail it."""
        return len(self.recent) >= _MIN_STEPS_TO_JUDGE and all(map(test, self.recent))

    def at_least(self, name: str, limit: float) -> bool:
        """Return whether a metric was at or above a limit in all recent steps."""
        return self.always(lambda row: row.get(name, math.nan) >= limit)

    @property
    def num_updates(self) -> float:
        """Number of updates in the recent steps, or nan if it was not recorded."""
        return self.latest.get("version", math.nan) - self.before.get("version", 0.0)

    def are_many(self, num_updates: float) -> bool:
        """Return whether this number of recent updates is too high for chance: at least three, and a fifth of all."""
        return num_updates >= max(_MIN_UPDATES, _UPDATES_SHARE * self.num_updates)

    @property
    def span(self) -> str:
        """The recent steps in words."""
        return "this step" if len(self.recent) == 1 else f"the last {len(self.recent)} steps"

    @property
    def is_solved(self) -> bool:
        """Whether nearly all responses of the recent steps pass."""
        rewards = self.values(reward_metric(self.latest))
        return bool(rewards) and all(map(is_pass_rate, self.recent)) and fmean(rewards) >= _HIGH_PASS_RATE


def _finite(rows: Iterable[StepRow], name: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := row.get(name, math.nan))]


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that raises an alarm, and what the alarm tells the user."""

    name: str
    saw: Callable[[Steps], str | None]
    """Function that returns what it saw in the steps so far. None means that nothing is wrong."""
    cause: str
    change: str
    unless: tuple[str, ...] = ()
    """Alarms that explain this one. It stays silent while one of them fires."""
    tries: tuple[tuple[str, float | str], ...] = ()
    """Settings to change in a branch, with a factor or a value; the first one that makes a difference is proposed."""
    from_before: bool = False
    """Whether a branch should start before the steps that raised the alarm."""


def _mismatch(steps: Steps) -> str | None:
    if not steps.latest.get("mismatch/alarms", 0.0) > 0:
        return None
    difference = steps.latest.get("mismatch/logprob_mean", math.nan)
    return (
        "engine and trainer disagree about the log-probs of the same weights: mismatch/logprob_mean is "
        f"{difference:.2g}, over monitor.mismatch_alarm."
    )


def _gradient_spikes(steps: Steps) -> str | None:
    num = math.fsum(steps.values("optimizer/grad_alarms"))
    if not steps.are_many(num):
        return None
    largest = max(steps.values("optimizer/grad_norm_max"), default=math.nan)
    return (
        f"the gradient norm spiked in {num:.0f} of the {steps.num_updates:.0f} updates of {steps.span}, up to "
        f"{largest:.3g}: over 10 times the usual, or over monitor.grad_norm_alarm."
    )


def _large_updates(steps: Steps) -> str | None:
    kl, rate = steps.latest.get("loss/approx_kl", math.nan), steps.latest.get("optimizer/lr", math.nan)
    if not (kl >= _LOST_NATS or rate >= LARGE_RATE):
        return None
    moved = f", and the policy is {kl:.2g} nats per token from the one that sampled" if kl >= _LOST_NATS else ""
    return f"the learning rate is {rate:g}{moved}."


def _one_reward(steps: Steps) -> str | None:
    num_responses = math.fsum(steps.values("rollout/num_samples"))
    means, stds = steps.values("reward/mean"), steps.values("reward/std")
    if num_responses < _MIN_RESPONSES_TO_JUDGE or len({*means}) != 1 or any(stds) or not stds:
        return None
    return f"all {num_responses:.0f} responses of {steps.span} have the same reward, {means[0]:g}."


def _equal_rewards(steps: Steps) -> str | None:
    if "teacher/kl" in steps.latest or not steps.at_least("rollout/zero_variance_share", _NEARLY_ALL):
        return None  # a teacher teaches in each group
    share = fmean(steps.values("rollout/zero_variance_share"))
    return f"in {percent(share)} of the groups of {steps.span}, all responses have the same reward."


def _no_group_kept(steps: Steps) -> str | None:
    dropped = math.fsum(steps.values("rollout/num_dropped_groups"))
    judged = dropped + math.fsum(steps.values("rollout/num_groups"))
    if len(steps.recent) < _MIN_STEPS_TO_JUDGE or not dropped or dropped < _NEARLY_ALL * judged:
        return None
    return f"{dropped:.0f} of the {judged:.0f} groups judged in {steps.span} were dropped."


def _all_cut(steps: Steps) -> str | None:
    if not steps.at_least("rollout/truncated_share", 1.0):
        return None
    return f"every response of {steps.span} was cut off at rollout.max_response_tokens."


def _most_cut(steps: Steps) -> str | None:
    if not steps.at_least("rollout/truncated_share", 0.5):
        return None
    share = fmean(steps.values("rollout/truncated_share"))
    return f"{percent(share)} of the responses of {steps.span} were cut off at rollout.max_response_tokens."


def _flat_pass_rate(steps: Steps) -> str | None:
    if not all(map(is_pass_rate, steps.recent)):
        return None
    evaluations = {name: pairs for name, pairs in steps.evaluations.items() if name in steps.latest}
    found = (_flat(name, pairs) for name, pairs in evaluations.items())
    saw = next((text for text in found if text is not None), None)
    return None if saw is None or _has_risen(steps.rows) else saw


def _flat(name: str, pairs: Sequence[tuple[float, float]]) -> str | None:
    """Describe a set whose evaluations show no rise and are precise enough to exclude a rise of 0.05.

    The rise is measured on the straight line through the pass rates; its interval follows from their standard errors.

    Args:
        pairs: pass rate and standard error of each evaluation.
    """
    num = len(pairs)
    if num < _MIN_EVALUATIONS:
        return None
    offsets = [i - (num - 1) / 2 for i in range(num)]
    scale = (num - 1) / math.fsum(x * x for x in offsets)
    rise = scale * math.fsum(x * rate for x, (rate, _) in zip(offsets, pairs, strict=True))
    half = Z_95 * scale * math.sqrt(math.fsum((x * error) ** 2 for x, (_, error) in zip(offsets, pairs, strict=True)))
    level = fmean(rate for rate, _ in pairs)
    highest = level + Z_95 * math.sqrt(math.fsum(error**2 for _, error in pairs)) / num
    if rise - half > 0 or rise + half > _SMALL_GAIN or highest >= _HIGH_PASS_RATE:
        return None
    return f"{name} has not risen in {num} evaluations: it is {level:.3f}, its rise {rise:+.3f} ± {half:.3f}."


def _has_risen(rows: Sequence[StepRow]) -> bool:
    """Return whether the mean reward of the last ten steps exceeds the mean of the first ten by more than chance.

    This recognizes a run that learned before its first evaluation.
    """
    window, name = min(_WINDOW_STEPS, len(rows) // 2), reward_metric(rows[-1])
    return _exceeds(_finite(rows[len(rows) - window :], name), _finite(rows[:window], name))


def _exceeds(values: Sequence[float], others: Sequence[float], least: float = 0.0) -> bool:
    """Return whether the mean of some values exceeds the mean of others by more than chance, and than `least`."""
    if min(len(values), len(others)) < 2:
        return False
    error = math.sqrt(variance(values) / len(values) + variance(others) / len(others))
    return fmean(values) - fmean(others) > max(Z_95 * error, least)


def _no_entropy(steps: Steps) -> str | None:
    if not steps.always(lambda row: row.get("loss/entropy", math.nan) <= _ENTROPY_NATS) or steps.is_solved:
        return None
    entropy = max(0.0, fmean(steps.values("loss/entropy")))  # rounding may leave it below 0
    return f"the entropy is {entropy:.1g} nats per token in {steps.span}."


def _rising_entropy(steps: Steps) -> str | None:
    """Compare four equal stretches up to this step: entropy rose from each to the next, and rewards fell in the last.

    In early training, and with an entropy bonus of the right size, rewards do not fall. Other data change the entropy
    within a few steps, which is a rise from the first stretch to the second and third, and none to the last.
    """
    for num in _RISE_STEPS:
        if len(steps.rows) < 4 * num:
            break
        stretches = [steps.rows[-i * num :][:num] for i in (4, 3, 2, 1)]
        entropies = [_finite(rows, "loss/entropy") for rows in stretches]
        rewards = [_finite(rows, reward_metric(steps.latest)) for rows in stretches]
        if not all(entropies) or not all(rewards):
            continue
        levels, means = [*map(fmean, entropies)], [*map(fmean, rewards)]
        is_rising = all(after > max(0.0, _RISE * before) for before, after in pairwise(levels))
        least = _FALL_STDS * stretches[-1][0].get("reward/std", 0.0)
        if is_rising and means[-1] <= means[-2] and _exceeds([*chain(*rewards[:-1])], rewards[-1], least):
            return (
                f"within {4 * num} steps, the entropy rose from {levels[0]:.2g} to {levels[-1]:.2g} nats per token and "
                f"the mean reward fell from {means[0]:.2g} to {means[-1]:.2g}."
            )
    return None


def _all_clipped(steps: Steps) -> str | None:
    if not steps.always(lambda row: _clipped_share(row) >= _CLIPPED_SHARE):
        return None
    share = fmean(map(_clipped_share, steps.recent))
    return f"{percent(share)} of the tokens with an advantage were clipped in {steps.span}, and have no gradient."


def _all_filtered(steps: Steps) -> str | None:
    if not steps.at_least("loss/filtered_share", _CLIPPED_SHARE):
        return None
    share = percent(fmean(steps.values("loss/filtered_share")))
    return f"{share} of the trained tokens were masked or rejected in {steps.span}, and teach nothing."


def _clipped_share(row: StepRow) -> float:
    """Return the clipped share of the tokens with an advantage, or nan if it is unknown or no token has one."""
    clipped = row.get("loss/clip_high_share", math.nan) + row.get("loss/clip_low_share", math.nan)
    clipped += row.get("loss/dual_clip_share", 0.0)
    pushed = row.get("loss/positive_token_share", math.nan) + row.get("loss/negative_token_share", math.nan)
    return clipped / pushed if pushed > 0 else math.nan


def _still_policy(steps: Steps) -> str | None:
    rates = [row.get("optimizer/lr", math.nan) for row in steps.recent]
    if not all(rate > 0 and rate >= _LR_SHARE * steps.peak_lr for rate in rates) or rates[-1] > rates[0]:
        return None
    signs = {
        "the gradient is 0": lambda row: row.get("optimizer/grad_norm", math.nan) == 0,
        "tokens of older weights are as likely as when they were sampled (loss/approx_kl is 0)": lambda row: (
            row.get("staleness/mean", math.nan) >= _OLD_TOKEN_UPDATES
            and abs(row.get("loss/approx_kl", math.nan)) <= _KL_NATS
        ),
        "the policy is still the reference (loss/kl_reference is 0)": lambda row: (
            abs(row.get("loss/kl_reference", math.nan)) <= _KL_NATS
        ),
    }
    for sign, test in signs.items():
        if steps.always(test):
            return f"{sign} in {steps.span}, at a learning rate of {rates[-1]:.1g}."
    return None


def _inert_bounds(steps: Steps) -> str | None:
    if not steps.at_least("bapo/inert_share", 1.0):
        return None
    if any(math.isnan(row.get("bapo/positive_share", 0.0)) for row in steps.recent):  # there was nothing to balance
        return None
    return f"no search of {steps.span} moved the clip bounds: BAPO is plain fixed clipping here."


def _saturated_search(steps: Steps) -> str | None:
    if not steps.at_least("bapo/saturated_share", 1.0):
        return None
    return f"every search of {steps.span} ended with both clip bounds at their limits, before its target."


def _rounded_adapters(steps: Steps) -> str | None:
    if len(steps.rows) < _WINDOW_STEPS:  # B begins at 0
        return None
    if not steps.always(lambda row: row.get("optimizer/merged_share", math.nan) <= _ROUNDED_SHARE):
        return None
    share = fmean(steps.values("optimizer/merged_share"))
    return f"adapters changed {percent(share)} of their layers' weights in {steps.span}, once rounded for the engines."


def _skipped_updates(steps: Steps) -> str | None:
    totals = [row.get("optimizer/skipped", 0.0) for row in (steps.before, *steps.recent)]
    num = math.fsum(increases(totals))
    if not steps.are_many(num):
        return None
    return f"{num:.0f} of the {steps.num_updates:.0f} updates of {steps.span} were skipped: no finite gradient."


_NOTHING_TO_LEARN = ("one reward", "equal rewards")

RULES = (
    Rule(
        "mismatch",
        _mismatch,
        cause="the engine computes in another type, samples with settings that the trainer does not know, or holds "
        "other weights; the update is then off-policy without anyone noticing.",
        change="check the engine's type, its sampling settings and the weight sync; "
        'loss.proximal = "learner" limits the effect on the update.',
        tries=(("loss.proximal", "learner"),),
    ),
    Rule(
        "gradient spikes",
        _gradient_spikes,
        cause="samples with extreme ratios, or a learning rate that is too high; the updates were made, cut to "
        "optimizer.clip_grad.",
        change="lower optimizer.lr, and look at the samples and ratios of these steps (optimizer/grad_alarms).",
        tries=(("optimizer.lr", 1 / 3),),
    ),
    Rule(
        "large updates",
        _large_updates,
        cause="a learning rate that is far too high: Adam moves each weight by about that much in one update, and "
        f"weights are about {LARGE_RATE:g} in size.",
        change="start again with a lower optimizer.lr, such as 1e-6 for a large model.",
        unless=("mismatch",),
    ),
    Rule(
        "one reward",
        _one_reward,
        cause="a judge that gives one reward to everything, answers in a form that it does not accept, or prompts that "
        "the policy always or never solves.",
        change="look at samples.jsonl, fix the judge or the form of the answers, or choose easier or harder prompts.",
    ),
    Rule(
        "equal rewards",
        _equal_rewards,
        cause="prompts that the policy always or never solves: such a group has no advantage.",
        change="choose easier or harder prompts, or raise rollout.samples_per_prompt.",
        unless=("one reward",),
        tries=(("rollout.samples_per_prompt", 2),),
    ),
    Rule(
        "no group kept",
        _no_group_kept,
        cause="prompts that are far too easy or too hard for this policy, or a judge that gives one reward to "
        "everything.",
        change="look at samples.jsonl, choose other prompts, raise rollout.samples_per_prompt, "
        'or set rollout.keep_group = "all".',
        tries=(("rollout.keep_group", "all"),),
    ),
    Rule(
        "all responses cut",
        _all_cut,
        cause="a limit that is too low, or a policy that never ends: its chat template or end-of-sequence token does "
        "not fit the model.",
        change="raise rollout.max_response_tokens, or check the template and the stop tokens.",
        tries=(("rollout.max_response_tokens", 2),),
    ),
    Rule(
        "most responses cut",
        _most_cut,
        cause="a limit that is too low for these prompts, or responses that ramble.",
        change="raise rollout.max_response_tokens, or reward brevity.",
        unless=("all responses cut",),
        tries=(("rollout.max_response_tokens", 2),),
    ),
    Rule(
        "flat pass rate",
        _flat_pass_rate,
        cause="rewards that do not tell good responses from bad ones, a learning rate that is too low, or prompts "
        "beyond the policy's reach.",
        change="look at the judge's verdicts in samples.jsonl, raise optimizer.lr, or choose easier prompts.",
        tries=(("optimizer.lr", 3),),
    ),
    Rule(
        "no entropy",
        _no_entropy,
        cause="a policy that has collapsed to one response, or a temperature near 0: samples of a prompt are copies.",
        change="check rollout.temperature; start from an earlier checkpoint with a lower optimizer.lr, a higher upper "
        "clip bound (bapo.rho0, bapo.high) or train.entropy_coef.",
        tries=(("optimizer.lr", 1 / 3),),
        from_before=True,
    ),
    Rule(
        "rising entropy",
        _rising_entropy,
        cause="a learning rate that is too high, clip bounds that are too wide for old samples, failures that outweigh "
        "successes, or an entropy bonus that is too large: the policy falls apart.",
        change="start from an earlier checkpoint with a lower optimizer.lr, a lower upper clip bound (bapo.rho0, "
        "bapo.high), fewer passes or a lower train.entropy_coef.",
        unless=("mismatch",),
        tries=(("train.entropy_coef", 1 / 3), ("optimizer.lr", 1 / 3)),
        from_before=True,
    ),
    Rule(
        "all tokens clipped",
        _all_clipped,
        cause="clip bounds that are too narrow, samples that are too old, or too many passes over them.",
        change="widen the clip bounds, or lower train.epochs_per_step, train.minibatches_per_step or "
        "rollout.max_staleness.",
        tries=(("train.epochs_per_step", 1 / 2), ("train.minibatches_per_step", 1 / 2)),
    ),
    Rule(
        "all tokens filtered",
        _all_filtered,
        cause="loss.filter_floor and loss.filter_cap that are too near to 1, or samples that are too old.",
        change="widen them, filter by a response's mean (loss.filter_level), or lower rollout.max_staleness.",
    ),
    Rule(
        "policy stands still",
        _still_policy,
        cause="a learning rate so low that rounding leaves the weights unchanged, or a loss that masks every token.",
        change="raise optimizer.lr, and check the loss and its masks.",
        unless=(*_NOTHING_TO_LEARN, "all tokens clipped", "all tokens filtered", "skipped updates"),
        tries=(("optimizer.lr", 3),),
    ),
    Rule(
        "rounded adapters",
        _rounded_adapters,
        cause="adapters so small that rounding the merged weights to model.dtype leaves most of them as they were, so "
        "that engines sample from the policy before training.",
        change="raise optimizer.lr or lora.alpha.",
        unless=(*_NOTHING_TO_LEARN, "all tokens clipped", "all tokens filtered", "skipped updates"),
        tries=(("optimizer.lr", 3),),
    ),
    Rule(
        "inert bounds",
        _inert_bounds,
        cause="the positive share is at its target from the start.",
        change="raise bapo.rho0 to let the search act.",
        tries=(("bapo.rho0", 1.2),),
    ),
    Rule(
        "saturated search",
        _saturated_search,
        cause="a target that is out of reach within the ranges of the bounds.",
        change="lower bapo.rho0, or widen bapo.low and bapo.high.",
        tries=(("bapo.rho0", 0.8),),
    ),
    Rule(
        "skipped updates",
        _skipped_updates,
        cause="a learning rate that is too high, or data that make the loss overflow.",
        change="lower optimizer.lr, and check the data.",
        tries=(("optimizer.lr", 1 / 3),),
        from_before=True,
    ),
)
_BY_NAME = {rule.name: rule for rule in RULES}
_OF_ERRORS: dict[type[UserError], str] = {NoGroupKeptError: "no group kept", DivergedError: "skipped updates"}


def first_impressions(row: StepRow, environment: EnvironmentConfig, max_response_tokens: int) -> list[str]:
    """Return lines about the first step: what keeps nearly all responses from teaching anything, and what to do.

    Args:
        row: the step's metrics.
        max_response_tokens: rollout.max_response_tokens.
    """
    lines, num = [], round(row.get("rollout/num_samples", 0))
    if row.get("rollout/truncated_share", math.nan) >= _NEARLY_ALL:
        num_cut = round(num * row["rollout/truncated_share"])
        lines.append(
            f"{num_cut} of the {num} responses were cut at rollout.max_response_tokens={max_response_tokens}: raise "
            "it, or check which tokens end a turn (docs/data.md)"
        )
    has_turns = environment.max_turns > 1 and not environment.is_agent  # a program may ask only once
    if has_turns and row.get("environment/answered_share", math.nan) <= 1 - _NEARLY_ALL:
        num_asked = round(num * row["environment/answered_share"])
        is_tools = environment.kind == "tools"
        told, how = ("called a tool", "call one") if is_tools else ("continued after the first turn", "continue")
        lines.append(
            f"{num_asked} of the {num} responses {told}, and a policy that never does so cannot learn it "
            f"(docs/turns.md): look at samples.jsonl, and let the prompts say when and how to {how}"
        )
    return lines


class AlarmLog:
    """The alarms of a run, in the order in which they were raised.

    Args:
        rows: its steps so far.
        run: its folder; alarms then say how to branch it with the change.
    """

    def __init__(self, rows: Iterable[StepRow] = (), run: Path | None = None) -> None:
        self._run = run
        self._steps = Steps()
        self._raised: dict[str, Alarm] = {}
        for row in rows:
            self.observe(row)

    @property
    def raised(self) -> list[Alarm]:
        return list(self._raised.values())

    def observe(self, row: StepRow) -> list[Alarm]:
        """Take in the next step, and return the alarms that fire at it."""
        self._steps.add(row)
        found = {rule.name: saw for rule in RULES if (saw := rule.saw(self._steps)) is not None}
        firing = [name for name in found if not any(other in found for other in _BY_NAME[name].unless)]
        return [self._raise(name, int(row["step"]), found[name]) for name in firing]

    def end(self, error: UserError) -> list[Alarm]:
        """Raise the alarm that an error stands for, if any, at the step that the error ended; return it."""
        for kind, name in _OF_ERRORS.items():
            if isinstance(error, kind):
                saw = str(error).partition(": ")[0]  # the rest is advice
                num_done = int(self._steps.latest["step"]) if self._steps.rows else 0
                return [self._raise(name, num_done + 1, f"{saw}.")]
        return []

    def _raise(self, name: str, step: int, saw: str) -> Alarm:
        rule = _BY_NAME[name]
        if (before := self._raised.get(name)) is None:
            command = self._run and _branch_with(rule, self._run, self._steps)
            change = f"{rule.change} In a new run: {command}" if command else rule.change
            before = Alarm(name, step, step, 0, saw, rule.cause, change)
        self._raised[name] = replace(before, last_step=step, num_steps=before.num_steps + 1)
        return self._raised[name]


def _branch_with(rule: Rule, run: Path, steps: Steps) -> str | None:
    """Return the command that branches a run with what a rule proposes, or None without a checkpoint for it.

    The run may be at its last step, whose checkpoint follows the alarm, or have ended long ago: a report tells it then.
    """
    first = int(steps.recent[0]["step"]) if steps.recent else 1
    saved = [step for step in steps_saved(run) if step < first or not rule.from_before]
    if not saved:
        return None
    settings = {name: value for name, (_, value) in different_settings("", text_of(run / "config.toml")).items()}
    for name, change in rule.tries:
        if (value := settings.get(name)) is None:
            continue
        new = change if isinstance(change, str) else type(value)(float(f"{value * change:.2g}"))
        if new and new != value:
            if rule.from_before:
                return branch_command(run, {name: new}, max(saved))
            num_done = max([*saved, *(int(row["step"]) for row in steps.recent[-1:])])
            return branch_command(run, with_more_steps({name: new}, num_done, settings.get("train.num_steps")))
    return None
