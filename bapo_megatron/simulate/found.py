"""The output of `bapo plan --simulate`."""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bapo_megatron.errors import ConfigError, NoGroupKeptError, plural
from bapo_megatron.preflight.explain import PLANNED_S, time_text
from bapo_megatron.preflight.plan import make_plan, memory_problems, step_balance
from bapo_megatron.resolved import Resolved
from bapo_megatron.simulate.run import Simulated, simulate
from bapo_megatron.simulate.settings import Simulation
from bapo_megatron.simulate.setup import Slice, make_slice, recorded_lengths

_BAR = 40  # characters of a bar for all tokens


@dataclass(frozen=True, slots=True)
class Found:
    """A simulation's result, for people and programs."""

    settings: Simulation
    part: Slice
    result: Simulated
    planned_s: float  # a step by roofline

    @property
    def step_s(self) -> float:
        """The mean of the counted steps."""
        return self.result.seconds / len(self.result.steps_s)

    @property
    def usd_per_step(self) -> float | None:
        price = self.settings.usd_per_gpu_hour
        return None if price is None else price * self.part.num_gpus * self.step_s / 3600

    def to_json(self) -> str:
        """Return all figures, of the whole run where they depend on its size."""
        result, part = self.result, self.part
        found: dict[str, Any] = {
            "gpus": part.num_gpus,
            "slices": part.num_slices,
            "steps": len(result.steps_s),
            "step_s": {"mean": self.step_s, **_spread(result.steps_s)},
            "planned_step_s": self.planned_s,
            "trainer_idle": result.trainer_idle,
            "servers_idle": result.servers_idle,
            "servers_prefilling": result.servers_prefilling,
            "tokens_per_s_and_gpu": self._rate(result.trained_tokens),
            "generated_per_s_and_gpu": self._rate(result.generated_tokens),
            "response_tokens": result.trained_tokens / result.num_responses,
            "age": {"mean": mean_of(result.ages), **_quantiles(result.ages), "shares": result.ages},
            "first_token_age_steps": {"mean": mean_of(result.first_ages), "shares": result.first_ages},
            "rank_zero_core": {"all": sum(result.rank_zero.values()), **result.rank_zero},
            "usd_per_step": self.usd_per_step,
            "fenced": result.num_fenced,
            "dropped_groups": result.num_dropped,
            "settings": self.settings.model_dump(),
        }
        return json.dumps(found, indent=2)

    @property
    def text(self) -> str:
        return "\n".join(self._lines())

    def _rate(self, num_tokens: int) -> float:
        return num_tokens * self.part.num_slices / self.result.seconds / self.part.num_gpus

    def _lines(self) -> Iterator[str]:
        result, part, settings = self.result, self.part, self.settings
        steps, world = _spread(result.steps_s), part.world
        what = f"{plural(len(result.steps_s), 'step')} after {settings.warmup_steps}, {plural(part.num_gpus, 'GPU')}"
        if part.num_slices > 1:
            what += f"; one of {part.num_slices} equal slices, with {plural(world.num_servers, 'server')} and "
            what += f"{plural(world.rollout.prompts_per_step, 'prompt')} a step"
        yield f"simulated  {what}"
        yield (
            f"step       {time_text(self.step_s)} on average, {time_text(steps['p10'])} to {time_text(steps['p90'])}; "
            f"the plan has {time_text(self.planned_s)}"
        )
        yield (
            f"idle       trainer {result.trainer_idle:.0%}, servers {result.servers_idle:.0%}; prefills take "
            f"{result.servers_prefilling:.0%} of the servers' time"
        )
        yield (
            f"tokens     {self._rate(result.trained_tokens):,.0f} trained and "
            f"{self._rate(result.generated_tokens):,.0f} sampled per second and GPU; "
            f"{result.trained_tokens / result.num_responses:,.0f} a response"
        )
        ages = _quantiles(result.ages)
        yield (
            f"age        {mean_of(result.ages):.2f} updates on average, half of the tokens at most {ages['p50']}, "
            f"99% at most {ages['p99']}, all at most {ages['max']}"
        )
        for age, share in result.ages.items():
            yield f"           {age:>4} {share:6.1%} {'#' * round(_BAR * share)}".rstrip()
        parts = ", ".join(f"{name} {share:.1%}" for name, share in result.rank_zero.items())
        yield f"rank 0     {sum(result.rank_zero.values()):.1%} of a core for replies: {parts}"
        if (cost := self.usd_per_step) is not None:
            yield f"cost       {cost:,.2f} USD a step, at {settings.usd_per_gpu_hour:g} an hour and GPU"
        if settings.down or any(result.num_dropped.values()):
            dropped = ", ".join(f"{num} {reason}" for reason, num in result.num_dropped.items()) or "none"
            yield f"faults     {plural(result.num_fenced, 'server')} fenced off; groups dropped: {dropped}"
        yield (
            "           the scheduler is the run's own; speeds are the plan's expected ones unless given; without "
            "evaluation and checkpoints"
        )
        most = world.rollout.max_response_tokens
        if settings.lengths_from is None and part.mean_tokens == most:
            yield f"           all responses have the greatest length, {most:,} tokens; --response-tokens is their mean"
        if part.num_slices > 1 and not (world.rollout.overlap or world.rollout.abort_tail):
            yield "           a step waits for its longest response, which is longer in the whole than in a slice"


def simulated(run: Resolved, settings: Simulation, response_tokens: int | None) -> Found:
    """Simulate a planned run.

    Raises:
        ConfigError: it does not fit, or there is nothing to simulate; as `bapo plan` says it.
    """
    config = run.config
    if config.cluster.gpu is None:
        raise ConfigError(
            "--simulate runs on the GPUs of [cluster]; set cluster.gpu, or merge a file of clusters/, such as "
            "clusters/1x8-h100"
        )
    recorded = recorded_lengths(settings, config.rollout.max_response_tokens)
    plan = make_plan(run, response_tokens if recorded is None else max(1, round(recorded.mean)))
    if problems := [v.message for v in memory_problems(run, plan)]:
        raise ConfigError("\n".join(problems))
    part = make_slice(run, plan, settings, recorded)
    balance = step_balance(config, plan)
    assert balance is not None, "there are servers"
    if balance.step_s < PLANNED_S:
        raise ConfigError("too small to simulate: less than 1 s a step; requests, judges and Python take longer")
    try:
        return Found(settings, part, simulate(part.world, settings.steps, settings.warmup_steps), balance.step_s)
    except NoGroupKeptError as error:
        raise ConfigError(
            f"--simulate kept_share={settings.kept_share:g} leaves no groups to train; raise it"
        ) from error


def mean_of(shares: Mapping[int, float]) -> float:
    """Return the mean of a distribution."""
    return sum(value * share for value, share in shares.items())


def _quantiles(shares: Mapping[int, float]) -> dict[str, int]:
    found = {"max": max(shares)}
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        so_far = 0.0
        for value in sorted(shares):
            so_far += shares[value]
            if so_far >= quantile - 1e-9:
                found[name] = value
                break
    return found


def _spread(seconds: tuple[float, ...]) -> dict[str, float]:
    if len(seconds) == 1:
        return {"p10": seconds[0], "p50": seconds[0], "p90": seconds[0]}
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return {"p10": deciles[0], "p50": deciles[4], "p90": deciles[8]}
