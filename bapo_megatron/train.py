"""The training loop. Every trainer rank runs this file; rank 0 also talks to the rollout engines and to the user.

    prompts -> engines -> rewards -> advantages       rank 0, RolloutManager.next_batch: finished groups, FIFO
        |  broadcast: the same Batch on every rank
        v
    minibatches -> score -> BAPO bounds -> step       all ranks: one optimizer update per mini-batch; sample replay
        |                                             makes later mini-batches older
        v
    push weights -> engines                           all ranks gather, rank 0 broadcasts: a new weight version
        |
        v
    metrics, checkpoint                               rank 0 records; all ranks save

A step waits for its rollouts; partial responses that it leaves behind are resumed by the next step, with new weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.buffer.packing import minibatches
from bapo_megatron.buffer.share import share_batch, share_metrics
from bapo_megatron.checkpoints import CheckpointStore
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.base import Learner
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.proximal import with_proximal_logprobs
from bapo_megatron.monitor.record import Recorder, UpdateMetrics
from bapo_megatron.monitor.rundir import RunDir
from bapo_megatron.monitor.stopwatch import Stopwatch
from bapo_megatron.rollout.base import Rollouts
from bapo_megatron.rollout.manager import RolloutManager
from bapo_megatron.rollout.recorded import RecordedRollouts
from bapo_megatron.sync.base import Channel
from bapo_megatron.sync.channel import FollowerChannel, open_channel, push_until_whole
from bapo_megatron.types import Batch, MiniBatch


def train(config: Config, urls: list[str], run_dir: RunDir, recorder: Recorder | None) -> None:
    """Train from the run's latest checkpoint, or from the start, to `train.num_steps`."""
    model_path = resolve_model_path(config.model.path)
    learner = MegatronLearner(config, model_path)
    rollouts = _connect(config, model_path, urls) if recorder else None
    finder = BoundsFinder(config, learner)
    store = CheckpointStore(run_dir.checkpoints_dir, config.checkpoint.keep_last)
    first_step = _resume(store, learner, rollouts, finder)
    channel = _open_channel(config, rollouts, learner, run_dir)
    if recorder and rollouts:
        recorder.begin(first_step, rollouts.decode)

    _push(channel, learner, rollouts)
    baseline = _evaluate(config, rollouts, first_step, learner.version) if first_step == 0 else {}
    if recorder and baseline:
        recorder.note(f"evaluation before training: reward {baseline['eval/reward']:.3f}")
    watch = Stopwatch()
    for step in range(first_step, config.train.num_steps):
        updates = UpdateMetrics(config)
        with watch.span("rollout"):
            while (batch := _next_batch(config, rollouts, recorder, step, learner.version)) is None:
                _push(channel, learner, rollouts)  # an engine came back, without weights
        if config.loss.proximal == "learner":
            with watch.span("score"):
                batch = with_proximal_logprobs(batch, learner, config)
        for minibatch in _optimizer_steps(batch, config, step, learner):
            with watch.span("score"):
                bounds = finder.find(minibatch)
            with watch.span("train"):
                result = learner.step(minibatch, bounds)
                finder.observe(minibatch, result.log_probs)
            updates.add(bounds, result)
        with watch.span("sync"):
            sync = _push(channel, learner, rollouts)
        with watch.span("eval"):
            evaluation = _evaluate(config, rollouts, step + 1, learner.version)
        if recorder:
            recorder.record(step + 1, learner.version, batch.metrics, updates.result(), sync, evaluation, watch.lap())
        if _is_save_due(config, step + 1):
            store.save(step + 1, learner, _rollout_state(rollouts, finder))
    if channel:
        channel.close()
    if rollouts:
        rollouts.close()


def _connect(config: Config, model_path: Path, urls: list[str]) -> Rollouts:
    if config.rollout.engine == "recorded":
        return RecordedRollouts.connect(config, model_path)
    return RolloutManager.connect(config, model_path, urls)


def _next_batch(
    config: Config, rollouts: Rollouts | None, recorder: Recorder | None, step: int, version: int
) -> Batch | None:
    """Rank 0 samples and judges; every rank gets the same batch, or the same error."""

    def sample() -> Batch | None:
        assert rollouts is not None
        assert recorder is not None
        if (made := rollouts.next_batch(step, version)) is None:
            return None
        batch, groups = made
        recorder.keep_samples(step + 1, groups)
        return batch

    return share_batch(sample if rollouts else None, sign_of_life_s=config.parallel.timeout_s / 4)


def _evaluate(config: Config, rollouts: Rollouts | None, num_done: int, version: int) -> dict[str, float]:
    """Rank 0 asks the engines where an evaluation is due; the same answer on every rank."""
    interval = config.eval.interval_steps
    if interval is None or (num_done % interval and num_done != config.train.num_steps):
        return {}
    ask = partial(rollouts.evaluate, version) if rollouts else None
    return share_metrics(ask, sign_of_life_s=config.parallel.timeout_s / 4)


def _optimizer_steps(batch: Batch, config: Config, step: int, learner: Learner) -> Iterator[MiniBatch]:
    if config.train.rollout_only:
        return iter(())
    return minibatches(
        batch,
        num_minibatches=config.train.minibatches_per_step,
        num_epochs=config.train.epochs_per_step,
        seed=config.run.seed * 1_000_003 + step,
        max_tokens=config.train.max_tokens_per_microbatch,
        share=learner.share,
    )


def _open_channel(
    config: Config, rollouts: Rollouts | None, learner: MegatronLearner, run_dir: RunDir
) -> Channel | None:
    """Rank 0 talks to the engines; the other ranks take part in gathering the weights. None where there are none."""
    if config.rollout.engine == "recorded":
        return None
    channel: Channel = FollowerChannel()
    if isinstance(rollouts, RolloutManager):
        loop, folder = rollouts.loop, run_dir.path / "weights"
        channel = open_channel(config.sync, rollouts.pool, loop.submit, folder=folder, hf_path=learner.hf_path)
    channel.connect(learner.weight_specs())
    return channel


def _push(channel: Channel | None, learner: Learner, rollouts: Rollouts | None) -> dict[str, float]:
    """Hand the weights to every engine as a new version; all ranks take part in gathering them."""
    if channel is None:
        return {}
    if rollouts:
        rollouts.expect(learner.version)
    return push_until_whole(channel, learner).metrics()


def _resume(store: CheckpointStore, learner: Learner, rollouts: Rollouts | None, finder: BoundsFinder) -> int:
    """Restore the latest checkpoint, if there is one; returns the number of finished steps."""
    latest = store.latest()
    if latest is None:
        return 0
    state = store.load(latest, learner)
    finder.load_state_dict(state["bounds"])
    if rollouts:
        rollouts.load_state_dict(state["rollout"])
    return int(state["step"])


def _rollout_state(rollouts: Rollouts | None, finder: BoundsFinder) -> dict[str, Any] | None:
    return {"rollout": rollouts.state_dict(), "bounds": finder.state_dict()} if rollouts else None


def _is_save_due(config: Config, num_done: int) -> bool:
    interval = config.checkpoint.interval_steps
    return interval is not None and (num_done % interval == 0 or num_done == config.train.num_steps)
