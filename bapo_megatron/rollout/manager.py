"""Rollouts as the training loop sees them: a blocking `next_batch`, with an event loop of its own behind it.

Lives on trainer rank 0 only. The event loop runs in a thread, so that HTTP replies are read while the trainer works.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.base import Engine, EngineState
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.states import EngineStates
from bapo_megatron.errors import EngineError, NoEngineLeftError
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rewards import RewardScorer, is_informative
from bapo_megatron.rollout.evaluate import Evaluator, eval_metrics
from bapo_megatron.rollout.metrics import batch_metrics
from bapo_megatron.rollout.scheduler import RolloutStats, Scheduler, Score
from bapo_megatron.runtime.heartbeat import HEARTBEAT
from bapo_megatron.types import Batch, Group, Trajectory

EVAL_SEED = 1_000_003  # added to run.seed, so that evaluation draws other prompts than training

T = TypeVar("T")


class LoopThread:
    """An asyncio event loop in a daemon thread; `run` hands it a coroutine and waits, with a deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        HEARTBEAT.loops["rollout"] = self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start it and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        timeout_s: float,
        what: str = "the rollout engines",
        progress: Callable[[], tuple[int, ...]] = tuple,
    ) -> T:
        """The coroutine's result.

        Args:
            timeout_s: for all of it, where it shows no `progress`; else for nothing to change in it.
            what: who is waited for.
            progress: counts that change while it goes on; asked every `timeout_s`, so that what hangs is told after one
                to two of these.

        Raises:
            EngineError: nothing came back, and nothing changed, within `timeout_s`.
        """
        future, seen = self.submit(coroutine), progress()
        while not concurrent.futures.wait([future], timeout_s).done:
            if (now := progress()) == seen:
                future.cancel()
                sign = "progress" if seen else "answer"
                raise EngineError(f"waited {timeout_s:g} s for {what}: no {sign}; see the engines' logs")
            seen = now
        return future.result()

    def close(self) -> None:
        HEARTBEAT.loops.pop("rollout", None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)


class RolloutManager:
    """Engines, prompts, rewards and the scheduler of one run: implements `rollout.base.Rollouts`."""

    def __init__(self, config: Config, tokenizer: Any, urls: Sequence[str], vocab_size: int) -> None:
        self.config = config
        self.loop = LoopThread()
        self._tokenizer = tokenizer
        timeout_s = config.rollout.request_timeout_s
        self.engines = [
            HttpEngine(url, request_timeout_s=timeout_s, vocab_size=vocab_size, generate_url=config.rollout.router_url)
            for url in urls
        ]
        self.pool = EnginePool(self.engines)
        self.prompts = PromptStream(config, tokenizer)
        self.prompts.check()
        self._scorer = RewardScorer(config)
        self._stop_token_ids = (int(tokenizer.eos_token_id),)
        self._builder = BatchBuilder(config)
        self.scheduler = Scheduler(
            config.rollout,
            pool=self.pool,
            prompts=self.prompts,
            score=self._judge_with(self._scorer),
            stop_token_ids=self._stop_token_ids,
            seed=config.run.seed,
            drop_reason=self._drop_reason,
            updates_per_step=config.train.minibatches_per_step * config.train.epochs_per_step,
        )
        self._watches = [self.loop.submit(self.pool.watch())]
        self._states = EngineStates(self.pool, self.engines)
        if config.monitor.prometheus_port is not None:
            self._watches.append(self.loop.submit(self._states.watch()))
        self._last_batch_s = time.monotonic()
        self._evaluator: Evaluator | None = None
        self._eval_scorer: RewardScorer | None = None
        if config.eval.interval_steps is not None:
            self._evaluator, self._eval_scorer = self._build_evaluator()

    @classmethod
    def connect(cls, config: Config, model_path: Path, urls: Sequence[str]) -> RolloutManager:
        """With the tokenizer and vocabulary of the policy's checkpoint, once every engine is healthy.

        Raises:
            EngineError: an engine is not healthy within rollout.startup_timeout_s.
        """
        vocab_size = load_hf_config(model_path)["vocab_size"]
        rollouts = cls(config, load_tokenizer(model_path), urls, vocab_size)
        timeout_s = config.rollout.startup_timeout_s
        for engine in rollouts.engines:
            rollouts.loop.run(wait_healthy(engine, timeout_s), 2 * timeout_s + 10, f"{engine.url} to be healthy")
        return rollouts

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def engine_states(self) -> list[EngineState]:
        """As of a few seconds ago; empty where nobody watches (monitor.prometheus_port)."""
        return self._states.latest

    def expect(self, version: int) -> None:
        """To be called before weights of this version are pushed."""
        self.scheduler.expect(version)

    def next_batch(self, step: int, version: int) -> tuple[Batch, list[Group]] | None:
        """Sample, judge and pack the batch of one step.

        Returns None where all live engines are gone but one is back: it needs the weights pushed again.

        Raises:
            EngineError: the engines failed, or no token and no verdict came in for longer than any of them may take.
        """
        taking = self.scheduler.take(step, version)
        groups, stats = self.loop.run(taking, self._patience_s, f"the rollouts of step {step}", self._progress)
        if groups is None:
            return None
        now_s = time.monotonic()
        metrics = self._metrics(groups, stats, now_s - self._last_batch_s)
        self._last_batch_s = now_s
        return self._builder.build(groups, metrics), groups

    def evaluate(self, version: int) -> dict[str, float] | None:
        """Metrics of the weights of `version`, which were just pushed; nothing without eval.interval_steps.

        Returns None as `next_batch` does, and goes on where it was when it is asked again.

        Raises:
            EngineError: no engine is left and none comes back, or they hang.
            UserError: the judge says that the data is wrong.
        """
        if (evaluator := self._evaluator) is None or self._eval_scorer is None:
            return {}
        try:
            samples = self.loop.run(evaluator.sample(version), evaluator.deadline_s, evaluator.what, evaluator.progress)
        except NoEngineLeftError:
            timeout_s = self.config.rollout.startup_timeout_s
            self.loop.run(self.pool.until_one_is_back(timeout_s), timeout_s + 10, "an engine to be back")
            return None
        return eval_metrics(samples, self._judge_with(self._eval_scorer)(samples))

    def state_dict(self) -> dict[str, Any]:
        """JSON value; taken between two events of the loop, since sampling may be going on."""

        async def on_loop() -> dict[str, Any]:
            return self.scheduler.state_dict()

        sampling = self.loop.run(on_loop(), 60.0, "the state of the rollouts")
        return {**sampling, "batches": self._builder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)
        self._builder.load_state_dict(state["batches"])

    def close(self) -> None:
        """Stop sampling; let go of connections and workers."""
        self.loop.run(self.scheduler.close(), self._patience_s, "sampling to stop", self._progress)
        for watch in self._watches:
            watch.cancel()
        for engine in self.engines:
            self.loop.run(engine.close(), 10.0, f"{engine.url} to close")
        for scorer in (self._scorer, self._eval_scorer):
            if scorer is not None:
                scorer.close()
        self.loop.close()

    @property
    def _patience_s(self) -> float:
        """The longest time without progress of engines and judges that keep their deadlines; past it, something hangs.

        A request fails with all its repetitions, an engine comes back, the responses of a group are judged one by one,
        each of them twice.
        """
        r = self.config.rollout
        judging_s = 2 * self.config.reward.timeout_s * r.samples_per_prompt
        return r.request_timeout_s * (r.max_retries + 1) + r.startup_timeout_s + judging_s

    def _progress(self) -> tuple[int, ...]:
        """What grows while sampling goes on: tokens, verdicts, and engines that are given up with their requests."""
        return self.scheduler.ledger.num_tokens["generated"], self._scorer.num_judged, self.pool.num_fenced

    def _judge_with(self, scorer: RewardScorer) -> Score:
        def score(trajectories: Sequence[Trajectory]) -> list[float]:
            texts = self._tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
            return scorer.score([(t.prompt, text) for t, text in zip(trajectories, texts, strict=True)])

        return score

    def _drop_reason(self, group: Group) -> str | None:
        """Dynamic sampling: a group that cannot change the policy makes room for another."""
        is_kept = self.config.rollout.zero_variance == "keep" or is_informative(group, self.config)
        return None if is_kept else "zero_variance"

    def _build_evaluator(self) -> tuple[Evaluator, RewardScorer]:
        """Prompts of `eval.path`, or of the same procedural source with another seed."""
        config = self.config
        run = config.run.model_copy(update={"seed": config.run.seed + EVAL_SEED})
        data = config.data.model_copy(update={"path": config.eval.path})
        config = config.model_copy(update={"run": run, "data": data})
        stream, scorer = PromptStream(config, self._tokenizer), RewardScorer(config)
        num_prompts = min(config.eval.num_prompts, len(stream.source))
        prompts = [stream.next() for _ in range(num_prompts)]
        return Evaluator(config, self.pool, prompts, self._stop_token_ids), scorer

    def _metrics(self, groups: Sequence[Group], stats: RolloutStats, elapsed_s: float) -> dict[str, float]:
        """What this batch looks like, and what it took; names are explained in docs/metrics.md."""
        return {
            **batch_metrics(groups),
            **self._scorer.metrics(),
            "rollout/num_rounds": float(stats.num_rounds),
            "rollout/num_retries": float(stats.num_retries),
            "rollout/num_stale_groups": float(stats.num_stale_groups),
            "rollout/num_dropped_groups": float(stats.num_dropped_groups),
            "rollout/num_fenced": float(stats.num_fenced),
            "rollout/tokens_generated": float(stats.num_tokens),
            "rollout/tokens_per_s": stats.num_tokens / max(elapsed_s, 1e-9),
            "data/skipped": float(self.prompts.skipped_empty + self.prompts.skipped_too_long),
            **{f"ledger/{state}": float(n) for state, n in self.scheduler.ledger.counts().items()},
        }


async def wait_healthy(engine: Engine, timeout_s: float) -> None:
    """Return when the engine answers its health check.

    Raises:
        EngineError: it does not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not await engine.health():
        if time.monotonic() > deadline:
            raise EngineError(
                f"{engine.url} is not healthy after rollout.startup_timeout_s = {timeout_s:g} s; is a server running "
                "there?"
            )
        await asyncio.sleep(0.2)
