"""Rollouts for the training loop: a blocking `next_batch` on trainer rank 0, with the engines' event loop behind it."""

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.buffer.batch import BatchBuilder, BuilderState
from bapo_megatron.config.schema import Config, EvalSet
from bapo_megatron.engines.base import EngineState
from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.engines.key import client_key
from bapo_megatron.errors import CheckpointError, NoEngineLeftError
from bapo_megatron.hf.tokenizer import end_token_ids, load_tokenizer
from bapo_megatron.prompts import build_source
from bapo_megatron.prompts.mixture import PromptMixture, prompts_of
from bapo_megatron.prompts.stop_tokens import stop_token_ids
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.resolved import Resolved
from bapo_megatron.rewards import RewardScorer
from bapo_megatron.rewards.shaping import group_filter
from bapo_megatron.rewards.verdicts import JudgeSpec, Verdict
from bapo_megatron.rollout.agents import AgentDriver
from bapo_megatron.rollout.annotators import Annotators
from bapo_megatron.rollout.book import BookState
from bapo_megatron.rollout.dispatch import RolloutStats
from bapo_megatron.rollout.drivers import Driver, JudgeOnce, StepDriver, TextJudge
from bapo_megatron.rollout.evaluate import Evaluator, eval_metrics
from bapo_megatron.rollout.recorded import RecordedRollouts
from bapo_megatron.rollout.scheduler import Scheduler
from bapo_megatron.rollout.shared import Rollouts
from bapo_megatron.rollout.teacher import CHECK_TIMEOUT_S, OwnServers, Teacher, TeacherServers, hinted_teacher
from bapo_megatron.rollout.turn_tokens import TurnTokens, environment_of, turn_driver
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.types import Batch, Group, Prompt

RewardSource = RewardScorer | StepDriver | AgentDriver
"""The source of rewards and of metrics about them: a judge or an environment."""
EVAL_SEED = 1_000_003  # added to run.seed, so that evaluation and training draw different prompts


@dataclass(slots=True)
class InRunEvaluation:
    """The evaluation inside a run: its own problems, and judges or environments that do not disturb training's."""

    evaluator: Evaluator
    answers: list[RewardSource]
    prompt_digests: dict[str, str] = field(default_factory=dict)  # see `Rollouts.prompt_digests`


class ManagerState(BookState):
    """A `RolloutManager` in a checkpoint."""

    batches: BuilderState


@dataclass(slots=True)
class RolloutManager:
    """The rollouts of a run with engines: implements `rollout.shared.Rollouts`. `connect_rollouts` builds it."""

    config: Config
    engines: ConnectedEngines
    prompts: PromptStream | PromptMixture
    tokenizer: Any
    answers: RewardSource
    scheduler: Scheduler
    builder: BatchBuilder
    evaluation: InRunEvaluation | None  # None without eval.interval_steps
    teacher: TeacherServers | None = None  # with teacher.urls or urls_by_source
    _last_batch_s: float = field(default_factory=time.monotonic)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    @property
    def prompt_digests(self) -> dict[str, str]:
        """The SHA-256 of the prompts of training and evaluation, by where they come from."""
        return self.prompts.digests() | (self.evaluation.prompt_digests if self.evaluation else {})

    def judge_failure(self) -> Verdict | None:
        """Return the first failure of the judge or the environment on responses for the latest batch."""
        return self.answers.recent_failure

    def engine_states(self) -> list[EngineState]:
        """Return states that are at most a few seconds old; empty without monitor.prometheus_port."""
        return self.engines.states

    def next_batch(self, step: int, version: int) -> tuple[Batch, list[Group]] | None:
        """Sample, judge and pack the batch of one step.

        Returns None if all live engines are gone but one is back: that engine needs the weights pushed again.

        Raises:
            EngineError: the engines failed, or no token and no verdict arrived for longer than any of them may take.
        """
        taking = self.scheduler.take(step, version)
        what = f"the rollouts of step {step}"
        groups, stats = self.engines.loop.run(taking, self._patience_s, what, self._progress)
        if groups is None:
            return None
        now_s = time.monotonic()
        metrics = self._metrics(stats, now_s - self._last_batch_s)
        self._last_batch_s = now_s
        return self.builder.build(groups, metrics), groups

    def pause(self) -> None:
        """End all requests for samples, which keep their tokens; the next batch resumes them."""
        pausing = self.scheduler.sampling.pause()
        self.engines.loop.run(pausing, self._patience_s, "requests to end before a push", self._progress)

    def evaluate(self, version: int) -> dict[str, float] | None:
        """Return metrics of the weights of `version`, which were just pushed; empty without eval.interval_steps.

        Returns None as `next_batch` does; the next call continues from there.

        Raises:
            EngineError: no engine is left and none comes back, or they hang.
            UserError: the judge says that the data is wrong.
        """
        if self.evaluation is None:
            return {}
        asked, loop = self.evaluation.evaluator, self.engines.loop
        try:
            loop.run(asked.sample(version), asked.deadline_s, asked.what, asked.progress)
        except NoEngineLeftError:
            pool = self.engines.pool
            loop.run(pool.until_one_is_back(), pool.return_limit_s + 10, "an engine to be back")
            return None
        metrics: dict[str, float] = {}
        for name, samples in loop.submit(asked.judged()).result().items():
            metrics |= eval_metrics(samples, name)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value, taken between two events of the loop, because sampling may be in progress."""

        async def on_loop() -> dict[str, Any]:
            return self.scheduler.state_dict()

        sampling = self.engines.loop.run(on_loop(), 60.0, "the state of the rollouts")
        return {**sampling, "batches": self.builder.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "recorded_from" in state:
            raise CheckpointError(
                "the checkpoint is from a replay of recorded rollouts; `bapo branch` its run with the new engine"
            )
        self.scheduler.load_state_dict(state)
        self.builder.load_state_dict(state["batches"])

    def close(self) -> None:
        """Stop sampling; close connections, judges and environments."""
        self.engines.loop.run(self.scheduler.close(), self._patience_s, "sampling to stop", self._progress)
        if self.teacher is not None:
            self.engines.loop.run(self.teacher.close(), 10.0, "the clients of the teacher to close")
        self.answers.close()
        if self.evaluation is not None:
            for answers in self.evaluation.answers:
                answers.close()
        self.engines.close()

    @property
    def _patience_s(self) -> float:
        """The longest time without progress if engines and judges keep their deadlines; after it, something hangs.

        It covers a request with all its retries, an engine's return, and the longest calls of driver and annotators.
        """
        r = self.config.rollout
        return_s = self.engines.pool.return_limit_s
        answer_s = self.scheduler.driver.deadline_s + self.scheduler.annotators.deadline_s
        return r.request_timeout_s * (r.max_retries + 1) + return_s + answer_s

    def _progress(self) -> tuple[int, ...]:
        """Return counts that grow during sampling: tokens, answers, and engines fenced with their requests."""
        num_tokens = self.scheduler.ledger.num_tokens["generated"]
        return num_tokens, self.scheduler.num_answers, self.engines.pool.num_fenced

    def _metrics(self, stats: RolloutStats, elapsed_s: float) -> dict[str, float]:
        """Return the costs of a batch, under the names of `bapo help metrics`."""
        filtered, has_environment = self.config.rollout.keep_group != "all", self.config.environment.is_used
        num_restarted = self.scheduler.ledger.num_samples["restarted"]
        unannotated = self.scheduler.annotators.num_failed
        judged_mean = statistics.fmean(stats.rewards) if stats.rewards else math.nan
        return {
            **self.answers.metrics(),
            **({"reward/judged_mean": judged_mean} if filtered else {}),
            "rollout/num_rounds": float(stats.num_rounds),
            "rollout/num_retries": float(stats.num_retries),
            "rollout/num_stale_groups": float(stats.num_stale_groups),
            "rollout/num_dropped_groups": float(stats.num_dropped_groups),
            **({"environment/failed_groups": float(stats.num_failed_groups)} if has_environment else {}),
            **({"environment/restarted_samples": float(num_restarted)} if self.config.environment.is_agent else {}),
            **({"rollout/num_unannotated": float(unannotated)} if self.scheduler.annotators.made else {}),
            "rollout/num_fenced": float(stats.num_fenced),
            "rollout/tokens_generated": float(stats.num_tokens),
            "rollout/tokens_per_s": stats.num_tokens / max(elapsed_s, 1e-9),
            "data/skipped": float(self.prompts.num_skipped),
            **{f"ledger/{state}": float(n) for state, n in self.scheduler.ledger.counts().items()},
        }


def open_rollouts(run: Resolved, urls: Sequence[str], *, may_have_failed: bool) -> Rollouts | None:
    """Return the rollouts of a run on its first rank, None elsewhere: recorded ones, or see `connect_rollouts`."""
    if os.environ.get("RANK", "0") != "0":
        return None
    HEARTBEAT.beat(TRAINER, "connecting prompts, judge and engines")
    if not run.engine.samples:
        return RecordedRollouts(run)
    return connect_rollouts(run, urls, may_have_failed=may_have_failed)


def connect_rollouts(run: Resolved, urls: Sequence[str], *, may_have_failed: bool = False) -> RolloutManager:
    """Build the rollouts of a run with its model's tokenizer and vocabulary, once every engine is healthy.

    Args:
        may_have_failed: engines may be down; see ConnectedEngines.connect.

    Raises:
        UserError: the prompts, the judge, the environment or an engine do not fit; names which.
    """
    config, vocab_size = run.config, run.shape.vocab_size
    key = client_key(run.engine, config.rollout.api_key)  # before judges inherit the environment
    tokenizer = load_tokenizer(run.folder, run.own)
    tokens = TurnTokens.of(config, tokenizer, vocab_size)
    stop_ids = stop_token_ids(config, tokenizer, end_token_ids(run.folder, tokenizer, run.own))
    prompts = prompts_of(config, tokenizer)
    prompts.check()
    answers: RewardSource
    scorer = RewardScorer(config) if config.has_judge else None
    if config.environment.is_used:
        limit = config.rollout.max_response_tokens
        driver: Driver = (answers := turn_driver(config, environment_of(config), tokens, limit, scorer))
    else:
        assert scorer is not None
        answers = scorer
        # The responses of a group are judged one by one, each of them twice.
        patience_s = 2 * config.reward.timeout_s * config.rollout.samples_per_prompt
        driver = JudgeOnce(TextJudge(answers, tokenizer), patience_s)
    streams = run.streams
    engines = ConnectedEngines.connect(
        config.rollout, run.engine, urls, vocab_size, key, streams, may_have_failed=may_have_failed
    )
    teacher, servers = _teacher(run, tokenizer, prompts, engines, is_new=not may_have_failed)
    annotators = (*run.annotators, *([] if teacher is None else [teacher]))
    scheduler = Scheduler(
        config.rollout,
        pool=engines.pool,
        prompts=prompts,
        driver=driver,
        stop_token_ids=stop_ids,
        seed=config.run.seed,
        keep=group_filter(config),
        updates_per_step=config.train.minibatches_per_step * config.train.epochs_per_step,
        streams=streams,
        annotators=Annotators(annotators, {place for place, one in enumerate(annotators) if one is teacher}),
        max_turn_tokens=config.environment.turn_limit,
    )
    evaluation = None
    if config.eval.interval_steps is not None:
        evaluation = _evaluation(config, engines, tokens, stop_ids)
    engines.watch(with_states=config.monitor.prometheus_port is not None)
    builder = BatchBuilder(config)
    return RolloutManager(config, engines, prompts, tokenizer, answers, scheduler, builder, evaluation, servers)


def _teacher(
    run: Resolved, tokenizer: Any, prompts: PromptStream | PromptMixture, engines: ConnectedEngines, *, is_new: bool
) -> tuple[Teacher | None, TeacherServers | None]:
    """Return the teacher that servers are, and its own servers, checked if the attempt `is_new`. Raises UserError."""
    config = run.config.teacher
    if config.hint is not None:
        own = OwnServers(engines.pool)
        engines.loop.run(own.check(), CHECK_TIMEOUT_S, "the capabilities of the engines")
        return hinted_teacher(config, prompts, own, run.config.longest_sequence), None
    if not config.all_urls:
        return None, None
    most = len(config.urls) or max(map(len, config.urls_by_source.values()))  # that one sample may ask
    servers = TeacherServers(config, run.shape.vocab_size, config.timeout_s / most)
    if is_new:  # a restart does without a teacher that has died
        HEARTBEAT.beat(TRAINER, "asking the teacher")
        patience_s = 10 * CHECK_TIMEOUT_S * len(config.all_urls)
        engines.loop.run(servers.check(run, tokenizer), patience_s, "the servers of the teacher")
    return Teacher(servers.score, config.timeout_s), servers


def _evaluation(
    config: Config, engines: ConnectedEngines, tokens: TurnTokens, stop_ids: tuple[int, ...]
) -> InRunEvaluation:
    """Take the prompts of every set. A procedural source draws its prompts with another seed than in training."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + EVAL_SEED})})
    environment = environment_of(config) if config.environment.is_used else None
    sets: list[tuple[EvalSet, list[Prompt]]] = []
    drivers: dict[str, Driver] = {}
    scorers: list[tuple[JudgeSpec, RewardScorer]] = []
    steps: list[StepDriver | AgentDriver] = []
    digests: dict[str, str] = {}
    for table, one in config.eval_sets.items():
        alone = config.with_prompts_of(one)
        stream = PromptStream(alone, tokens.tokenizer, build_source(alone, table))
        digests |= stream.digests(table)
        num_prompts = min(one.num_prompts, len(stream.source))
        sets.append((one, [stream.next() for _ in range(num_prompts)]))
        scorer = None
        if config.has_judge:
            spec = JudgeSpec.of(alone)
            if (scorer := next((scorer for other, scorer in scorers if other == spec), None)) is None:
                scorers.append((spec, scorer := RewardScorer(alone)))
        if environment is not None:
            limit = one.max_response_tokens or config.rollout.max_response_tokens
            steps.append(turn_driver(config, environment, tokens, limit, scorer))
            drivers[one.name] = steps[-1]
        else:
            assert scorer is not None
            drivers[one.name] = JudgeOnce(TextJudge(scorer, tokens.tokenizer))
    evaluator = Evaluator(config, engines.pool, sets, stop_ids, drivers)
    return InRunEvaluation(evaluator, [*(scorer for _, scorer in scorers), *steps], digests)
