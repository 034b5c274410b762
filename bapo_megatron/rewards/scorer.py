"""Rewards: a registry of judges, and the scorer that runs them under a deadline."""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pebble

from bapo_megatron.errors import UserError

if TYPE_CHECKING:  # judge processes import this file, and need neither pydantic models nor torch
    from bapo_megatron.config.schema import Config
    from bapo_megatron.types import Prompt

log = logging.getLogger(__name__)

Judge = Callable[[Any, str], float]
"""(Prompt.answer, response text without special tokens) -> reward."""
Verifier = Callable[["Prompt", str], float]

MAX_WORKERS = 8
MAX_POOL_STARTS = 3
WORKER_START_S = 120.0
WORKER_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class JudgeSpec:
    """What a judge is made from; small enough to send to a process."""

    kind: str
    dataset: str | None
    size: int
    seed: int
    options: dict[str, Any]

    @classmethod
    def of(cls, config: Config) -> JudgeSpec:
        """Resolves reward.kind = "auto". Raises UserError where kind and source do not go together."""
        source = config.data.source
        kind = config.reward.kind
        if kind == "auto":
            kind = "math" if source == "jsonl" else source
        if kind == "reasoning_gym" and source != "reasoning_gym":
            raise UserError(f"reward.kind = 'reasoning_gym' judges prompts of that source only, not of {source!r}")
        if kind == "chains" and source == "reasoning_gym":
            raise UserError("reward.kind = 'chains' cannot judge prompts of data.source = 'reasoning_gym'")
        data = config.data
        return cls(kind, data.dataset, data.size, config.run.seed, data.options)


def _chains(spec: JudgeSpec) -> Judge:
    from bapo_megatron.rewards.chains import judge_chain

    return judge_chain


def _math(spec: JudgeSpec) -> Judge:
    from bapo_megatron.rewards.math import judge_math

    return judge_math


def _reasoning_gym(spec: JudgeSpec) -> Judge:
    from bapo_megatron.rewards.reasoning_gym import build_judge

    return build_judge(spec.dataset, spec.size, spec.seed, spec.options)


JUDGES: dict[str, Callable[[JudgeSpec], Judge]] = {"chains": _chains, "math": _math, "reasoning_gym": _reasoning_gym}
EXACT = frozenset({"chains"})
"""Judges that always end at once and never raise: they run in this process."""


def build_verifier(config: Config) -> Verifier:
    """The configured judge, in this process and without a deadline (RewardScorer adds that). Raises UserError."""
    spec = JudgeSpec.of(config)
    judge = JUDGES[spec.kind](spec)
    return lambda prompt, response: judge(prompt.answer, response)


class RewardScorer:
    """Scores responses; one that its judge cannot judge within reward.timeout_s scores 0 and is counted.

    Judges that may hang or crash (math, reasoning_gym) run in spawned worker processes; a worker that hangs or dies is
    replaced, at the cost of its own response only.
    """

    def __init__(self, config: Config) -> None:
        self.num_timeouts = 0
        self.num_errors = 0
        self.timeout_s = config.reward.timeout_s
        self._spec = JudgeSpec.of(config)
        judge = JUDGES[self._spec.kind](self._spec)  # for workers too: a bad data set is told before the first step
        self._judge = judge if self._spec.kind in EXACT else None
        self._pool: pebble.ProcessPool | None = None

    def score(self, items: Sequence[tuple[Prompt, str]]) -> list[float]:
        """Rewards of (prompt, response text), in order. Raises RuntimeError if no worker process stays alive."""
        if self._judge is not None:
            return [self._judge(prompt.answer, response) for prompt, response in items]
        rewards: dict[int, float] = {}
        for _ in range(MAX_POOL_STARTS):
            pending = [i for i in range(len(items)) if i not in rewards]
            if not pending:
                return [rewards[i] for i in range(len(items))]
            self._score_in_workers(items, pending, rewards)
        raise RuntimeError(f"the worker processes that judge responses died {MAX_POOL_STARTS} times in a row")

    def close(self) -> None:
        """End the worker processes. Safe to call twice."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score_in_workers(
        self, items: Sequence[tuple[Prompt, str]], pending: list[int], rewards: dict[int, float]
    ) -> None:
        """Fill in the rewards of `pending`; leaves those out that had no worker because the whole pool broke."""
        pool = self._running_pool()
        futures = {
            i: pool.schedule(_judge_in_worker, args=[items[i][0].answer, items[i][1]], timeout=self.timeout_s)
            for i in pending
        }
        # a backstop, should even the watch over the workers fail
        limit_s = WORKER_START_S + self.timeout_s * len(pending)
        if concurrent.futures.wait(futures.values(), timeout=limit_s).not_done:
            raise RuntimeError(f"the worker processes that judge responses were not done after {limit_s:g} s")
        for i, future in futures.items():
            try:
                rewards[i] = self._reward(future, items[i][0])
            except BrokenProcessPool as error:  # a worker that dies while idle takes the pool with it
                log.warning("reward: starting new worker processes (%s)", error)
                self.close()
                return

    def _running_pool(self) -> pebble.ProcessPool:
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            self._pool = pebble.ProcessPool(
                max_workers=min(MAX_WORKERS, os.cpu_count() or 1),
                initializer=_init_worker,
                initargs=(self._spec,),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    def _reward(self, future: pebble.ProcessFuture, prompt: Prompt) -> float:
        try:
            return future.result()
        except (UserError, BrokenProcessPool):  # not about this response: the data set is another, or no worker is left
            raise
        except concurrent.futures.TimeoutError:
            self.num_timeouts += 1
            log.warning("reward: no verdict on a response to prompt %d in %g s", prompt.prompt_id, self.timeout_s)
        except Exception as error:  # of a third-party judge fed with arbitrary text, or the death of its process
            self.num_errors += 1
            log.warning("reward: judging a response to prompt %d failed: %r", prompt.prompt_id, error)
        return 0.0


_worker_judge: Judge | None = None


def _init_worker(spec: JudgeSpec) -> None:
    global _worker_judge
    # 10**10**10 in an answer should cost an error, not the machine's memory
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = WORKER_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(WORKER_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    _worker_judge = JUDGES[spec.kind](spec)


def _judge_in_worker(answer: Any, response: str) -> float:
    assert _worker_judge is not None
    return _worker_judge(answer, response)
