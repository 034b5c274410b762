"""What a simulation assumes: costs, lengths, environments, and what breaks."""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.types import Ended, Need, NeedsEnvironment, NeedsTokens, Prompt, Sample

RANK_ZERO_US: Mapping[str, float] = {"decode JSON": 0.18, "check": 0.15, "segments": 0.005, "batch": 0.04}
"""Microseconds of CPU for each token of SGLang's replies, 8,000 tokens each, measured in November 2026 on one core."""
REPLY_US: Mapping[str, float] = {"scheduler": 360.0}
"""For each reply: the scheduler's own decisions, measured overlapped with 64 and 256 simulated GPUs."""
ROUTE_US: Mapping[str, float] = {"routes": 0.0039}
"""For each expert that a layer chose for a token: 1.5 us for the 48 layers x 8 experts of Qwen3-30B-A3B."""


def standard_normal(*names: object) -> float:
    """Return a normally distributed number that depends on these names alone."""
    bits = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest()
    return statistics.NormalDist().inv_cdf((int.from_bytes(bits, "big") + 0.5) / 2**64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithms are normally distributed, cut at `most`."""

    median: float
    spread: float  # standard deviation of the logarithm
    most: int
    seed: int = 0

    @classmethod
    def with_mean(cls, mean: float, spread: float, most: int, seed: int) -> LogNormal:
        """Return the lengths that have this mean after they are cut."""
        num = 2000
        quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / num) for i in range(num)]

        def mean_of(log_median: float) -> float:
            return statistics.fmean(min(most, math.exp(log_median + spread * z)) for z in quantiles)

        low, high = math.log(mean) - spread**2, math.log(most) + 8 * spread + 1
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_of(middle) < mean else (low, middle)
        return cls(math.exp(high), spread, most, seed)

    def __call__(self, sample_id: str) -> int:
        drawn = self.median * math.exp(self.spread * standard_normal(self.seed, "length", sample_id))
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of recorded groups, drawn as whole groups: prompts whose responses are long keep them together."""

    groups: Sequence[Sequence[int]]
    seed: int = 0

    @property
    def mean(self) -> float:
        return statistics.fmean(length for group in self.groups for length in group)

    def __call__(self, sample_id: str) -> int:
        prompt_id, _, place = sample_id.partition(".")
        draw = statistics.NormalDist().cdf(standard_normal(self.seed, "group", prompt_id))
        group = self.groups[min(len(self.groups) - 1, int(draw * len(self.groups)))]
        return max(1, group[int(place) % len(group)])


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a decode step by the number of running responses, between measured points, whatever their contexts."""

    points: Sequence[tuple[int, float]]  # ascending

    def __call__(self, num: int, context: float) -> float:
        place = bisect.bisect_left(self.points, (num, -math.inf))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            last, seconds = self.points[-1]
            return seconds * max(1.0, num / last)
        (a, first), (b, second) = self.points[place - 1 : place + 1]
        return first + (second - first) * (num - a) / (b - a)


@dataclass(frozen=True)
class World:
    """Everything that a simulation needs besides the product's own code. Contexts and lengths are in tokens."""

    rollout: RolloutConfig  # the slice's; its limits in simulated tokens, see `in_units`
    num_servers: int
    step_s: Callable[[int, float], float]  # a decode step, by the number of responses and their mean context
    lengths: Callable[[str], int]  # a sample's tokens
    train_s: Callable[[int], float]  # training on this many sampled tokens
    push_s: float
    updates_per_step: int = 1
    pads: bool = False  # a decode step's time depends on the longest context, not on the mean, as the embedded engine's
    unit: int = 1  # tokens that one simulated token stands for
    prompt_tokens: int = 1  # simulated ones, as all that follow
    max_running: int = 256  # responses
    cache_tokens: float = math.inf
    prefill_s: float = 0.0  # seconds a token
    pass_s: float = 0.0  # for which running responses wait whenever others are admitted, besides these tokens
    call_s: float = 0.0  # a server's time for a call, whatever it holds
    request_s: float = 0.0  # a server's time for a request
    abort_s: float = 0.0  # a server's time for an abort
    num_turns: int = 1
    answer_tokens: int = 1  # simulated ones
    wait_s: Callable[[str], float] = lambda name: 0.0  # a judge's or an environment's time
    kept_share: float = 1.0  # of groups
    token_us: Mapping[str, float] = field(default_factory=dict)  # rank 0's CPU
    reply_us: Mapping[str, float] = field(default_factory=dict)
    shares_gpus: bool = False  # servers do nothing while the trainer trains
    ends_requests: bool = False  # before a push
    moves_s: float = 0.0
    down: Sequence[tuple[int, float, float]] = ()  # server, second at which it ends, seconds until it is back
    return_limit_s: float = 180.0
    seed: int = 0

    def in_units(self) -> World:
        """Return the world with its limits in simulated tokens."""
        r, unit = self.rollout, self.unit
        limits = {
            "max_response_tokens": max(1, math.ceil(r.max_response_tokens / unit)),
            "tokens_per_round": None if r.tokens_per_round is None else max(1, round(r.tokens_per_round / unit)),
            "ignore_stop_tokens": (),
        }
        return replace(
            self,
            rollout=r.model_copy(update=limits),
            prompt_tokens=max(1, round(self.prompt_tokens / unit)),
            answer_tokens=max(1, round(self.answer_tokens / unit)),
        )

    def turn_tokens(self, sample_id: str) -> int:
        """Return the simulated tokens of each turn of a sample."""
        return max(1, round(self.lengths(sample_id) / self.unit / self.num_turns))

    def tokens_left(self, sample_id: str, context: int) -> int:
        """Return how many simulated tokens a sample's turn still gets after this context."""
        turn = self.turn_tokens(sample_id)
        given = self.answer_tokens if self.num_turns > 1 else 0
        return turn - (context - self.prompt_tokens) % (turn + given) if given else turn - context + self.prompt_tokens


class Prompts:
    """An endless stream of prompts of one length."""

    def __init__(self, num_tokens: int) -> None:
        self._token_ids = (0,) * num_tokens
        self._next_id = 0

    def next(self) -> Prompt:
        self._next_id += 1
        return Prompt(self._next_id - 1, self._token_ids, "", "", "simulated")

    def state_dict(self) -> dict[str, int]:
        return {"next_id": self._next_id}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next_id = state["next_id"]


class Answers:
    """A `Driver`: the judge of single turns, asked about whole groups, or an environment."""

    deadline_s = 0.0
    first_need: Need = NeedsTokens()

    def __init__(self, world: World) -> None:
        self._world = world
        self.by_group = world.num_turns == 1

    async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
        """Answer after the time that the slowest of them takes."""
        await asyncio.sleep(max(self._world.wait_s(f"{s.sample_id}/{len(s.turn_rewards)}") for s in samples))
        return [self._answered(sample) for sample in samples]

    def _answered(self, sample: Sample) -> Sample:
        assert isinstance(sample.need, NeedsEnvironment)
        is_full = sample.num_sampled_tokens >= self._world.rollout.max_response_tokens
        if is_full or len(sample.turn_rewards) + 1 >= self._world.num_turns:
            return replace(sample, need=Ended(reason=sample.need.turn_end, reward=0.0))
        return sample.answered((0,) * self._world.answer_tokens)


class RankZero:
    """The core that reads replies on trainer rank 0: one after the other."""

    def __init__(self, world: World) -> None:
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self._world = world
        self._free_at_s = 0.0

    async def read(self, num_tokens: Sequence[int]) -> None:
        """Wait until replies with these numbers of simulated tokens are read."""
        num = sum(num_tokens) * self._world.unit
        costs = {name: us * num * 1e-6 for name, us in self._world.token_us.items()}
        costs |= {name: us * len(num_tokens) * 1e-6 for name, us in self._world.reply_us.items()}
        for name, seconds in costs.items():
            self.busy_s[name] += seconds
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + sum(costs.values())
        if self._free_at_s > now_s:
            await asyncio.sleep(self._free_at_s - now_s)
