"""The training loop. Every trainer rank runs this file; rank 0 also talks to the rollout engines and to the user.

    prompts -> engines -> rewards -> advantages       rank 0, SharedRollouts.next_batch: finished groups, stalest first
        |  each data rank gets the sequences that its passes need; a critic, if any, gives each token its own advantage
        v
    minibatches -> score -> BAPO bounds -> step       all ranks: one optimizer update per mini-batch; sample replay
        |                                             trains on older samples in later mini-batches
        v
    push weights -> engines                           all ranks gather, rank 0 broadcasts: a new weight version
        |
        v
    metrics, checkpoint                               rank 0 records; all ranks save

A step waits for its rollouts; the next step resumes, with new weights, the partial responses that it leaves behind.
With rollout.overlap, the engines keep sampling during everything below the first line.
"""

from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Tag
from typing_extensions import TypedDict

from bapo_megatron.algorithms.bound_search import BoundSearchState
from bapo_megatron.buffer.packing import sequences_of
from bapo_megatron.checkpoint.store import CheckpointStore, Saveable
from bapo_megatron.learner.base import Learner, UpdatesState
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.offload import Offload
from bapo_megatron.learner.values import ValueAdvantages
from bapo_megatron.learner.whole_batch import policy_passes, policy_updates, scorers_of, with_likeliest, with_scores
from bapo_megatron.machine.turns import open_turns
from bapo_megatron.monitor.console import evaluation_lines
from bapo_megatron.monitor.profile import StepProfiler
from bapo_megatron.monitor.record import Recorder, SilentRecorder, UpdateMetrics
from bapo_megatron.resolved import Resolved
from bapo_megatron.rollout.book import samples_fit
from bapo_megatron.rollout.manager import ManagerState, open_rollouts
from bapo_megatron.rollout.recorded import RecordedState, kind_of_rollouts
from bapo_megatron.rollout.shared import NEEDS_WEIGHTS, SharedRollouts
from bapo_megatron.rollout.shares import BatchShares
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.restarts import restart_of
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.runtime.phases import Phases, SeparateDevices
from bapo_megatron.runtime.ranks import StopFile
from bapo_megatron.runtime.stopwatch import Stopwatch
from bapo_megatron.runtime.straggler import compare_ranks
from bapo_megatron.sync import open_channel
from bapo_megatron.sync.base import SyncStats
from bapo_megatron.sync.folder import weights_folder
from bapo_megatron.types import Natural


class RunState(TypedDict):
    """The contents of a checkpoint's state.json."""

    step: Natural
    rollout: Annotated[
        Annotated[ManagerState, AfterValidator(samples_fit), Tag("sampled")]
        | Annotated[RecordedState, Tag("recorded")],
        Discriminator(kind_of_rollouts),
    ]
    bounds: BoundSearchState
    updates: UpdatesState


def train(run: Resolved, urls: list[str], run_dir: RunDir, recorder: Recorder | SilentRecorder, stop: StopFile) -> None:
    """Train from the run's latest checkpoint, or the start, to `train.num_steps` or `stop`. Rank 0 has a `Recorder`."""
    config, samples = run.config, run.engine.samples
    store = CheckpointStore(
        run_dir.checkpoints_dir,
        config.checkpoint,
        warn=recorder.note,
        state_type=RunState,
        run_id=run_dir.run_id,
        vocab_size=run.shape.vocab_size,
        streams=run.kept_streams,
    )
    connect = partial(open_rollouts, run, urls, may_have_failed=restart_of(run_dir) is not None)
    first, turns = None, None  # rollouts on rank 0; with turns, servers make room before the model is built
    if config.takes_turns and samples:
        first = connect()
        turns = open_turns(run, run_dir.turn_file, first.engines if first else None, store.close)
    phases: Phases = turns or SeparateDevices()
    with phases.training():
        HEARTBEAT.beat(TRAINER, "building the model")
        learner = MegatronLearner(run)
        layout = learner.layout
        advantages = ValueAdvantages(run, learner)
        finder = BoundsFinder(config, learner)
        scorers = scorers_of(config, learner, learner.reference, learner.teachers)
        shares = BatchShares(layout.data_rank, layout.pipeline_rank, layout.layers_of_stage, config.parallel.timeout_s)
        first = first or connect()
        rollouts = SharedRollouts(config, first, recorder.keep_samples, shares)
        models: dict[str, Saveable] = {"learner": learner, **advantages.parts}
        HEARTBEAT.beat(TRAINER, "looking for a checkpoint")
        first_step = _restore(store.resume(models), learner, rollouts, finder)
    if turns:
        turns.trainer = Offload(learner, advantages.critic, learner.reference, *learner.teachers)
    engines = first.engines if first else None
    callees = (engines.pool, engines.loop.submit) if engines else None
    kind = partial(open_channel, config.sync, channel=config.sync_channel, folder=weights_folder(config, run_dir))
    channel = kind(callees, hf_path=learner.hf_path) if samples else None

    def push() -> dict[str, float]:
        """Send the weights to every engine, if there are any, as a new version."""
        with phases.pushing():
            rollouts.before_push()
            sent = channel.send(learner.weights()) if channel else SyncStats()
        return channel.resume(sent).metrics() if channel else {}

    def evaluate(num_done: int) -> dict[str, float]:
        """Evaluate the weights that were just pushed, if an evaluation is due after `num_done` steps."""
        with phases.sampling():
            while (metrics := rollouts.evaluate(num_done, learner.version)) is NEEDS_WEIGHTS:
                push()
        return metrics

    with phases.pushing():
        if channel:
            channel.connect(learner.weights())
        recorder.begin(first_step, first, learner.sharing_problem)
        HEARTBEAT.beat(TRAINER, "sending the first weights to the engines")
        push()
    if first_step == 0 and (baseline := evaluate(0)):
        for line in evaluation_lines(baseline, "before training"):
            recorder.note(line)
    watch = Stopwatch(HEARTBEAT)
    profiler = StepProfiler(config.monitor, run_dir.path / "profile", layout.rank, engines, recorder.warn)
    for step in stop.steps(range(first_step, config.train.num_steps)):
        watch.begin(step)
        profiler.begin(step)
        updates = UpdateMetrics(config)
        with phases.sampling(), watch.span("rollout"):
            passes = advantages.passes(step) + policy_passes(config, step, learner, scorers)
            plan = partial(sequences_of, passes, data_size=layout.data_size)
            while (batch := rollouts.next_batch(step, learner.version, plan)) is NEEDS_WEIGHTS:
                push()  # the last engine has failed, and one is back
        with phases.training():
            with watch.span("critic"):
                batch = advantages.on(batch, step)
            with watch.span("score"):
                batch = with_scores(batch, scorers, learner, config)
            for minibatch in policy_updates(config, step, learner.share).minibatches(batch):
                with watch.span("score"):
                    minibatch = with_likeliest(minibatch, batch, learner.teachers, config.teacher.top_k)
                    bounds = finder.find(minibatch)
                with watch.span("train"):
                    result = learner.step(minibatch, bounds)
                    finder.observe(minibatch, result.log_probs)
                updates.add(result)
        with watch.span("sync"):
            sync = push()
        with watch.span("eval"):
            evaluation = evaluate(step + 1)
        times = watch.lap() | learner.take_times() | compare_ranks(learner.local_time) | phases.take_times()
        recorder.record(step + 1, learner.version, batch.metrics, updates.result(), sync, evaluation, times)
        updates.stop_on_mismatch(step + 1, store)
        with phases.saving(), watch.span("checkpoint"):
            store.poll()
            if stop.is_asked() or config.checkpoint.is_due(step + 1, config.train.num_steps):
                parts = {"bounds": finder.state_dict(), "updates": learner.state_dict()}
                store.save(step + 1, models, {"rollout": rollouts.state_dict(), **parts})
        profiler.end()
    store.close()
    if channel:
        channel.close()
    rollouts.close()


def _restore(state: dict[str, Any] | None, learner: Learner, rollouts: SharedRollouts, finder: BoundsFinder) -> int:
    """Load a checkpoint's state; return the number of finished steps."""
    if state is None:
        return 0
    finder.load_state_dict(state["bounds"])
    learner.load_state_dict(state["updates"])
    rollouts.load_state_dict(state["rollout"])
    return int(state["step"])
