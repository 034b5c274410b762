"""The speed limit that decoding alone sets, which benchmarks/rollout.py prints next to its measurements.

A decode step with n running responses, of which the longest has c tokens, takes t(n, c). The benchmark first measures
it, in the engine's own CPU time, as on an idle machine. A step of M tokens then takes

    synchronous             the sum of t(n, c) until the longest response ends, while n shrinks; then training
    partial, over-sampled   M / n times t(n, c) with n = all slots, because each ended response is replaced immediately;
                            then training
    overlapped              the same, or training, whichever takes longer

Prefill, weight pushes and the requests themselves are left out.
"""

import hashlib
import heapq
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

CALIBRATION_TOKENS = 32  # number of tokens sampled to time a decode step


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of every mode."""

    prompts_per_step: int = 8
    samples_per_prompt: int = 4
    prompt_tokens: int = 16
    max_response_tokens: int = 384
    median_tokens: float = 40.0
    sigma: float = 1.2  # standard deviation of the logarithm of a response's length
    seed: int = 0

    @property
    def slots(self) -> int:
        """Number of concurrent responses; one synchronous step fills it exactly."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_context(self) -> int:
        return self.prompt_tokens + self.max_response_tokens + CALIBRATION_TOKENS

    def length(self, sample_id: str) -> int:
        """Return a sample's number of response tokens, which is the same in all modes."""
        bits = hashlib.blake2b(f"{self.seed}/{sample_id}".encode(), digest_size=8).digest()
        z = statistics.NormalDist().inv_cdf((int.from_bytes(bits, "big") + 0.5) / 2**64)
        return max(1, min(self.max_response_tokens, round(self.median_tokens * math.exp(self.sigma * z))))

    def lengths(self, num_prompts: int) -> list[int]:
        """Return the lengths of all samples for the first prompts, in order."""
        return [self.length(f"{p}.{i}") for p in range(num_prompts) for i in range(self.samples_per_prompt)]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decode step, measured on a grid: seconds[i][j] with rows[i] responses of contexts[j] tokens."""

    rows: Sequence[int]
    contexts: Sequence[int]
    seconds: Sequence[Sequence[float]]

    def __call__(self, num_rows: int, context: int) -> float:
        """Interpolate linearly, and keep the edge values outside the grid."""
        by_rows = [np.interp(context, self.contexts, seconds) for seconds in self.seconds]
        return float(np.interp(num_rows, self.rows, by_rows))


def synchronous_s(lengths: Sequence[int], prompt_tokens: int, cost: Callable[[int, int], float]) -> float:
    """Return the seconds until the longest of these responses ends, if all begin together and none is replaced."""
    return sum(
        cost(sum(length > position for length in lengths), prompt_tokens + position + 1)
        for position in range(max(lengths))
    )


def full_slots_s(
    lengths: Iterable[int], num_slots: int, prompt_tokens: int, cost: Callable[[int, int], float]
) -> float:
    """Return the seconds per token with all slots busy: each response that ends is replaced by the next."""
    upcoming = iter(lengths)
    now, seconds = 0, 0.0
    slots: list[tuple[int, int]] = []  # heap of (step in which the response ends, step in which it began)
    for _ in range(num_slots):
        heapq.heappush(slots, (next(upcoming), 0))
    while True:
        end, _ = slots[0]
        while now < end:
            now += 1
            seconds += cost(num_slots, prompt_tokens + now - min(start for _, start in slots))
        while slots[0][0] == now:
            length = next(upcoming, None)
            if length is None:
                return seconds / (now * num_slots)
            heapq.heapreplace(slots, (now + length, now))


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit that decoding alone sets, in units of one synchronous rollout."""

    synchronous_s: float  # the unit, in seconds of CPU time
    full_slots: float  # time for the same number of tokens with all slots busy, in this unit
    train: float  # time of an optimizer step, in this unit

    def step(self, mode: str) -> float:
        """Return the time of one step."""
        if mode == "synchronous":
            return 1 + self.train
        return max(self.full_slots, self.train) if mode == "overlapped" else self.full_slots + self.train

    def speedup(self, mode: str) -> float:
        """Return tokens per second relative to the synchronous mode."""
        return self.step("synchronous") / self.step(mode)

    def idle_share(self, mode: str) -> float:
        """Return the share of time during which the trainer is idle."""
        return 1 - self.train / self.step(mode)


def bound(workload: Workload, cost: Callable[[int, int], float], *, num_steps: int, train_share: float) -> Bound:
    """Compute the bound from the lengths of the run's first steps."""
    lengths = workload.lengths(num_steps * workload.prompts_per_step)
    size, prompt = workload.slots, workload.prompt_tokens
    steps = [synchronous_s(lengths[i : i + size], prompt, cost) for i in range(0, len(lengths), size)]
    full_s = full_slots_s(lengths, size, prompt, cost) * len(lengths) * statistics.fmean(lengths)
    return Bound(statistics.fmean(steps), full_s / sum(steps), train_share)
