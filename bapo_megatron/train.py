"""The training loop. Every trainer rank runs this file; rank 0 also talks to the rollout engines and to the user.

    prompts -> engines -> rewards -> advantages       rank 0, SharedRollouts.next_batch: finished groups, stalest first
        |  each data rank gets the sequences that its passes need; a critic, if any, gives each token its own advantage
        v
    minibatches -> score -> BAPO bounds -> step       all ranks: one optimizer update per mini-batch; sample replay
        |                                             makes later mini-batches older
        v
    push weights -> engines                           all ranks gather, rank 0 broadcasts: a new weight version
        |
        v
    metrics, checkpoint                               rank 0 records; all ranks save

A step waits for its rollouts; the next step resumes the partial responses that it leaves behind, with new weights.
With rollout.overlap, the engines go on sampling during everything below the first line.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Tag
from typing_extensions import TypedDict

from bapo_megatron.algorithms.bound_search import BoundSearchState
from bapo_megatron.assets import resolve_model_path
from bapo_megatron.buffer.packing import sequences_of
from bapo_megatron.checkpoint.store import CheckpointStore, Saveable
from bapo_megatron.config.families import token_streams
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.learner.base import Learner, UpdatesState
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.values import ValueAdvantages
from bapo_megatron.learner.whole_batch import policy_passes, scorers_of, update_pass, with_scores
from bapo_megatron.monitor.profile import StepProfiler
from bapo_megatron.monitor.record import Recorder, SilentRecorder, UpdateMetrics
from bapo_megatron.monitor.rundir import RunDir
from bapo_megatron.monitor.summary import evaluation_lines
from bapo_megatron.rollout.book import samples_fit
from bapo_megatron.rollout.manager import ManagerState, RolloutManager, connect_rollouts
from bapo_megatron.rollout.recorded import RecordedRollouts, RecordedState
from bapo_megatron.rollout.shared import Rollouts, SharedRollouts
from bapo_megatron.rollout.shares import BatchShares
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.runtime.ranks import StopFile
from bapo_megatron.runtime.stopwatch import Stopwatch
from bapo_megatron.runtime.straggler import compare_ranks
from bapo_megatron.sync import open_channel
from bapo_megatron.sync.base import Channel
from bapo_megatron.types import Batch, Count, MiniBatch


def _kind_of_rollouts(state: Any) -> str:
    return "recorded" if isinstance(state, dict) and "recorded_from" in state else "sampled"


class RunState(TypedDict):
    """Contents of a checkpoint's state.json."""

    step: Count
    rollout: Annotated[
        Annotated[ManagerState, AfterValidator(samples_fit), Tag("sampled")]
        | Annotated[RecordedState, Tag("recorded")],
        Discriminator(_kind_of_rollouts),
    ]
    bounds: BoundSearchState
    updates: UpdatesState


def train(
    config: Config, urls: list[str], run_dir: RunDir, recorder: Recorder | SilentRecorder, stop: StopFile
) -> None:
    """Train from the run's latest checkpoint, or the start, to `train.num_steps` or `stop`. Rank 0 has a `Recorder`."""
    HEARTBEAT.beat(TRAINER, "building the model")
    model_path = resolve_model_path(config.model.path)
    learner = MegatronLearner(config, model_path)
    advantages = ValueAdvantages(config, learner)
    HEARTBEAT.beat(TRAINER, "connecting prompts, judge and engines")
    first = _connect(config, model_path, urls) if learner.layout.rank == 0 else None
    layout = learner.layout
    shares = BatchShares(layout.data_rank, layout.pipeline_rank, layout.layers_of_stage, config.parallel.timeout_s)
    rollouts = SharedRollouts(config, first, recorder.keep_samples, shares)
    finder = BoundsFinder(config, learner)
    scorers = scorers_of(config, learner, learner.reference)
    store = CheckpointStore(
        run_dir.checkpoints_dir,
        config.checkpoint,
        warn=recorder.note,
        state_type=RunState,
        run_id=run_dir.run_id,
        vocab_size=load_hf_config(model_path)["vocab_size"],
        streams=token_streams(config.model.family, model_path),
    )
    models: dict[str, Saveable] = {"learner": learner, **advantages.parts}
    HEARTBEAT.beat(TRAINER, "looking for a checkpoint")
    first_step = _restore(store.resume(models), learner, rollouts, finder)
    channel = _open_channel(config, first, learner, run_dir.path / "weights")

    def push() -> dict[str, float]:
        """Send the weights to every engine, if any, as a new version; all ranks take part."""
        return channel.push(learner).metrics() if channel else {}

    recorder.begin(first_step, first)
    HEARTBEAT.beat(TRAINER, "sending the first weights to the engines")
    push()
    if first_step == 0 and (baseline := rollouts.evaluate(0, learner.version, push)):
        for line in evaluation_lines(baseline, "before training"):
            recorder.note(line)
    watch = Stopwatch()
    engines = first.engines if isinstance(first, RolloutManager) else None
    profiler = StepProfiler(config.monitor, run_dir.path / "profile", learner.layout.rank, engines, recorder.warn)
    for step in profiler.steps(watch.steps(stop.steps(range(first_step, config.train.num_steps)))):
        updates = UpdateMetrics(config)
        with watch.span("rollout"):
            passes = advantages.passes(step) + policy_passes(config, step, learner, scorers)
            plan = partial(sequences_of, passes, data_size=layout.data_size)
            batch = rollouts.next_batch(step, learner.version, push, plan)
        with watch.span("critic"):
            batch = advantages.on(batch, step)
        with watch.span("score"):
            batch = with_scores(batch, scorers, learner, config)
        for minibatch in _optimizer_steps(batch, config, step, learner):
            with watch.span("score"):
                bounds = finder.find(minibatch)
            with watch.span("train"):
                result = learner.step(minibatch, bounds)
                finder.observe(minibatch, result.log_probs)
            updates.add(result)
        with watch.span("sync"):
            sync = push()
        with watch.span("eval"):
            evaluation = rollouts.evaluate(step + 1, learner.version, push)
        times = watch.lap() | learner.take_times() | compare_ranks()
        recorder.record(step + 1, learner.version, batch.metrics, updates.result(), sync, evaluation, times)
        with watch.span("checkpoint"):
            store.poll()
            if stop.is_asked() or _is_save_due(config, step + 1):
                parts = {"bounds": finder.state_dict(), "updates": learner.state_dict()}
                store.save(step + 1, models, {"rollout": rollouts.state_dict(), **parts})
    store.close()
    if channel:
        channel.close()
    rollouts.close()


def _connect(config: Config, model_path: Path, urls: list[str]) -> Rollouts:
    if not config.rollout.engine_kind.samples:
        return RecordedRollouts(config, model_path)
    return connect_rollouts(config, model_path, urls)


def _optimizer_steps(batch: Batch, config: Config, step: int, learner: Learner) -> Iterator[MiniBatch]:
    if config.train.rollout_only or step < config.critic.warmup_steps:
        return iter(())
    return update_pass(config, step, learner.share, config.train.epochs_per_step).minibatches(batch)


def _open_channel(config: Config, first: Rollouts | None, learner: MegatronLearner, folder: Path) -> Channel | None:
    """Connect all ranks to the engines; None without engines."""
    if not config.rollout.engine_kind.samples:
        return None
    engines = (first.engines.pool, first.engines.loop.submit) if isinstance(first, RolloutManager) else None
    channel = open_channel(config.sync, engines, folder=folder, hf_path=learner.hf_path)
    channel.connect(learner)
    return channel


def _restore(state: dict[str, Any] | None, learner: Learner, rollouts: SharedRollouts, finder: BoundsFinder) -> int:
    """Load a checkpoint's state; return the number of finished steps."""
    if state is None:
        return 0
    finder.load_state_dict(state["bounds"])
    learner.load_state_dict(state["updates"])
    rollouts.load_state_dict(state["rollout"])
    return int(state["step"])


def _is_save_due(config: Config, num_done: int) -> bool:
    interval = config.checkpoint.interval_steps
    return interval is not None and (num_done % interval == 0 or num_done == config.train.num_steps)
