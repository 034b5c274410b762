"""The records of trainer rank 0: metrics of each step, a few samples, alarms, and the console."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bapo_megatron.algorithms.mismatch import no_mismatch
from bapo_megatron.algorithms.update_rules import update_rule
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.lr_schedule import learning_rate, planned_updates
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError, escaped, escaped_lines, plural
from bapo_megatron.learner.base import StepResult
from bapo_megatron.machine.gpus import device_peak_flops
from bapo_megatron.machine.time_limit import check_time
from bapo_megatron.metrics import MAX_METRIC_CHARS, MAX_REWARD_PARTS, RewardParts, reduce_updates
from bapo_megatron.monitor.alarms import AlarmLog, first_impressions
from bapo_megatron.monitor.console import Console, shown_path
from bapo_megatron.monitor.sinks import BackgroundSink, open_sinks
from bapo_megatron.rollout.recorded import write_groups
from bapo_megatron.rollout.shared import Rollouts
from bapo_megatron.runs.branching import read_parent
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.inputs import changed_inputs, module_digests, record_inputs
from bapo_megatron.runs.numbers import duration, percent
from bapo_megatron.runs.restarts import num_restarts, restart_of
from bapo_megatron.runs.steps import read_metrics
from bapo_megatron.runs.summary import is_pass_rate, reward_metric
from bapo_megatron.runtime.files import JsonlWriter, truncate_after, write_atomically
from bapo_megatron.runtime.straggler import StragglerAlarm
from bapo_megatron.types import Batch, Ended, Given, Group, Sample, Segment, total

if TYPE_CHECKING:
    from bapo_megatron.monitor.prometheus import PrometheusEndpoint


class UpdateMetrics:
    """Metrics of a step's optimizer updates, reduced to one number each."""

    def __init__(self, config: Config) -> None:
        self._rule = update_rule(config.loss, config.bapo)
        self._own = config.loss.metrics
        self._values: dict[str, list[float]] = defaultdict(list)
        self._mismatch = no_mismatch()
        self._stops = config.monitor.mismatch_action == "stop"
        self._mismatch_that_stops: float | None = None  # mean of an update in nats, the same on every rank
        self._mismatch_limit = config.monitor.mismatch_limit(config.model.dtype, is_expected=config.expects_mismatch)

    def add(self, result: StepResult) -> None:
        for found in result.found:
            for name, value in self._rule.metrics(found).items():
                self._add(name, value)
        for name, value in result.metrics.items():
            self._add(name, value)
        self._mismatch += result.mismatch
        is_alarm = result.mismatch.num_tokens > 0 and not result.mismatch.mean <= self._mismatch_limit
        self._add("mismatch/alarms", float(is_alarm))
        if is_alarm and self._stops:
            self._mismatch_that_stops = result.mismatch.mean

    def result(self) -> dict[str, float]:
        return reduce_updates(self._values, self._own) | {
            "mismatch/logprob_mean": self._mismatch.mean,
            "mismatch/logprob_p99": self._mismatch.quantile(0.99),
            "mismatch/logprob_max": float(self._mismatch.largest) if self._mismatch.num_tokens else math.nan,
            "mismatch/kl": self._mismatch.kl,
            "mismatch/tokens": float(self._mismatch.num_tokens),
        }

    def stop_on_mismatch(self, step: int, store: CheckpointStore) -> None:
        """End the run, after the save in progress, if this step has trained on wrong log-probs. Collective.

        Raises:
            UserError: an update was over the limit, and monitor.mismatch_action is "stop".
        """
        if self._mismatch_that_stops is None:
            return
        store.close()
        latest = store.latest()
        raise UserError(
            f"step {step}: engine and trainer disagree about the log-probs of the same weights by "
            f'{self._mismatch_that_stops:.2g} nats, over monitor.mismatch_alarm, and monitor.mismatch_action = "stop". '
            "The weights of this step are not saved. Check the engine's type, its sampling settings and the weight "
            "sync; then the same command continues "
            + (f"after {latest.name}" if latest else "from the start, because no checkpoint was due")
        )

    def _add(self, name: str, value: float) -> None:
        self._values[name].append(value)


_COMPILING_STEPS = 2  # an attempt's first: kernels compile for packs of one size, then for packs of any size


class Recorder:
    """Output of a run's metrics and samples, on trainer rank 0 only."""

    def __init__(self, config: Config, run_dir: RunDir, console: Console) -> None:
        self._config = config
        self._run_dir = run_dir
        self._console = console
        self._rollouts: Rollouts | None = None  # set by `begin`
        self._num_restarts = num_restarts(run_dir.path)
        self._restart = restart_of(run_dir)  # None after the first step
        self._knows_step_time = False
        self._sinks: list[BackgroundSink] = []
        self._alarms = AlarmLog()
        self._reward_parts = RewardParts()
        self._has_left_out_parts = False
        self._stragglers = StragglerAlarm()
        self._steps_to_compile = _COMPILING_STEPS if torch.cuda.is_available() else 0
        self._endpoint: PrometheusEndpoint | None = None
        if config.monitor.prometheus_port is not None:
            from bapo_megatron.monitor.prometheus import PrometheusEndpoint  # needs prometheus_client

            self._endpoint = PrometheusEndpoint(config.run.name, config.monitor.prometheus_port, console.heartbeat)

    def begin(self, first_step: int, rollouts: Rollouts | None, problem: str | None = None) -> None:
        """Continue after `first_step` finished steps, and remove all records of later ones; warn of a problem."""
        assert rollouts is not None, "rank 0 makes the batches"
        truncate_after(self._run_dir.samples_path, first_step)
        num_lost = truncate_after(self._run_dir.metrics_path, first_step)
        history = read_metrics(self._run_dir.metrics_path)
        self._metrics = JsonlWriter(self._run_dir.metrics_path)
        self._samples = JsonlWriter(self._run_dir.samples_path)
        if own := self._config.loss.metrics:  # for reports, which do not import the user's modules
            write_atomically(self._run_dir.own_metrics_path, json.dumps([asdict(metric) for metric in own], indent=2))
        self._sinks = open_sinks(self._config, self._run_dir, first_step, self.warn)
        self._rollouts = rollouts
        self._console.resume(history)
        self._reward_parts = RewardParts(history)
        self._alarms = AlarmLog(history, self._run_dir.path)
        if problem:
            self.warn(problem)
        if self._endpoint is not None:
            self._endpoint.collector.engine_states = rollouts.engine_states
            self._console.note(f"metrics at {self._endpoint.url}")
        run, num_steps = shown_path(self._run_dir.path), self._config.train.num_steps
        again = f"; this repeats {plural(num_lost, 'unsaved step')}" if num_lost else ""
        inputs = module_digests(self._config) | rollouts.prompt_digests
        if num_lost and not first_step:
            self._console.note(f"{run} has no checkpoint and begins again at step 1 of {num_steps}{again}")
        if first_step:
            parent = read_parent(self._run_dir.path)
            of = f", a branch of {shown_path(Path(parent.run))} after step {parent.step}," if parent else ""
            self._console.note(f"resuming {run}{of} after step {first_step} of {num_steps}{again}")
            for changed in changed_inputs(self._run_dir.inputs_path, inputs):
                self.warn(
                    f"{shown_path(Path(changed))} has changed since this run last started, so it does not continue as "
                    "an uninterrupted run would; restore it, or stop this run and continue it with `bapo branch`"
                )
            since = history if parent is None else [row for row in history if row["step"] > parent.step]
            if (rise := rise_of_rate(since, self._config)) is not None:
                self.warn(
                    f"the learning rate rises from {rise[0]:.3g} to {rise[1]:.3g}: optimizer.schedule="
                    f'"{self._config.optimizer.schedule}" falls until the end of the run, and train.num_steps='
                    f"{num_steps} has moved it; a run that may become longer needs optimizer.total_updates"
                )
        record_inputs(self._run_dir.inputs_path, inputs)
        if self._steps_to_compile:
            self._console.note(f"the first {self._steps_to_compile} steps also compile kernels for the GPU")
        self._peak_flops = device_peak_flops(self._config.model.dtype)
        self._run_dir.mark_training(first_step)
        self._tell_status(first_step)

    def keep_samples(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Save the first responses of a step's batch for people and, with rollout.record, all of them for training."""
        if self._config.rollout.record:
            write_groups(self._run_dir.rollouts_dir, step, groups)
        assert self._rollouts is not None
        advantages = {} if self._config.advantage.is_per_token else turn_advantages(groups, batch)
        samples = [s for g in groups for s in g.samples]
        for sample in samples[: self._config.monitor.samples_per_step]:
            record = sample_record(step, sample, self._rollouts.decode, advantages.get(sample.sample_id))
            self._samples.write({**record, "of": len(samples)})

    def record(self, step: int, version: int, *parts: Mapping[str, float]) -> None:
        """Write and show step number `step`, counted from 1; `parts` are its metrics."""
        metrics: dict[str, float] = {"step": step, "version": version, "run/restarts": self._num_restarts}
        restart, self._restart = self._restart, None
        is_compiling = self._steps_to_compile > 0
        self._steps_to_compile -= is_compiling
        if restart:
            metrics["run/recovery_s"] = max(0.0, time.time() - restart.failed_at_s)
        for part in parts:
            metrics.update(part)
        if "train/tokens" in metrics:
            busy_s = metrics["time/score_s"] + metrics["time/train_s"]
            metrics["train/tokens_per_s"] = metrics["train/tokens"] / busy_s if busy_s > 0 else math.nan
            spent_s = metrics["time/forward_s"] + metrics["time/optimizer_s"]
            metrics["time/backward_s"] = max(0.0, metrics["time/train_s"] - spent_s)
            per_gpu = metrics["perf/tflop"] / busy_s / self._config.parallel.size if busy_s > 0 else math.nan
            metrics["perf/tflops_per_gpu"] = per_gpu
            if self._peak_flops is not None and not is_compiling:
                metrics["perf/mfu"] = per_gpu * 1e12 / self._peak_flops
        self._leave_out_parts(metrics)
        if self._sinks:
            metrics["monitor/sink_errors"] = sum(sink.num_errors for sink in self._sinks)
        self._metrics.write({name: float(value) for name, value in metrics.items()} | {"step": step})
        for sink in self._sinks:
            sink.write(step, metrics)
        if self._endpoint is not None:
            self._endpoint.collector.record(metrics)
        if step == 1:
            name = reward_metric(metrics)
            if name in metrics:
                num_responses = metrics["rollout/num_samples" if name == "reward/mean" else "reward/judged"]
                what = "pass rate" if is_pass_rate(metrics) else "mean reward"
                self._console.note(f"untrained {what} {metrics[name]:.2f} ({plural(round(num_responses), 'response')})")
            c = self._config
            for line in first_impressions(metrics, c.environment, c.rollout.max_response_tokens):
                self.warn(line)
        self._console.step(metrics)
        for alarm in self._alarms.observe(metrics):
            self._console.warn(alarm.text())
        self._tell_status(step)
        if restart:
            self._console.note(f"recovered {duration(metrics['run/recovery_s'])} after the failure")
        if not is_compiling and (warning := self._stragglers.observe(metrics)):
            self._console.warn(warning)
        self._warn_of_failures(step, metrics)
        if not self._knows_step_time:
            self._knows_step_time = True
            self._check_time_limit(metrics["time/step_s"])

    def note(self, text: str) -> None:
        self._console.note(text)

    def fail(self, error: UserError) -> None:
        """Keep the alarm that an error stands for, if any; the caller shows the error itself."""
        for alarm in self._alarms.end(error):
            self._console.warn(alarm.text())
        self._run_dir.write_status(alarms=self._alarms.raised)

    def _leave_out_parts(self, metrics: dict[str, float]) -> None:
        """Remove parts of the reward that `RewardParts` leaves out, and warn of the first."""
        for name in (left_out := self._reward_parts.left_out(metrics)):
            del metrics[name]
        if left_out and not self._has_left_out_parts:
            self._has_left_out_parts = True
            part = escaped(left_out[0].removeprefix("reward/").removesuffix("/mean")[:MAX_METRIC_CHARS])
            self._console.warn(
                f'a part of the reward is called "{part}": it counts in the reward, but is not a metric. A run records '
                f'{MAX_REWARD_PARTS} parts, with names of at most 64 letters, digits, "_", "-" and "."'
            )

    def _tell_status(self, num_done: int) -> None:
        self._run_dir.write_status(step=num_done, alarms=self._alarms.raised)

    def _warn_of_failures(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn about a judge or environment that fails often; keep the attempt's first reason in judge.txt."""
        assert self._rollouts is not None
        shares = [metrics.get(f"{name}/failed_share", 0.0) for name in ("environment", "reward")]
        is_environment, failed_share = shares[0] >= shares[1], max(shares)
        failure = self._rollouts.judge_failure() if failed_share > self._config.monitor.judge_alarm else None
        if failure is None:
            return
        path = self._run_dir.log_dir / "judge.txt"
        if not path.exists():
            write_atomically(path, escaped_lines(f"{failure.end.message}\n{failure.traceback}"))
        who, of, what = ("judge", "responses", "count as wrong")
        if is_environment:
            how = "which the judge scores as they are" if self._config.has_judge else "with the rewards that they have"
            who, of, what = ("environment", "turns", f"end their samples, {how}")
        self._console.warn(
            f"the {who} failed on {percent(failed_share)} of the {of} of step {step}, which {what}; first reason: "
            f"{failure.end.message} (see {shown_path(path)}; limit: monitor.judge_alarm)"
        )

    def _check_time_limit(self, step_s: float) -> None:
        """Check a SLURM job's time limit once the duration of a step is known."""
        if "SLURM_JOB_ID" in os.environ:
            for violation in check_time(self._config, step_s):
                self.warn(violation.message)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def end(self) -> None:
        """Show the summary, and close all outputs."""
        if self._rollouts is not None:
            for sink in self._sinks:
                sink.close()
            self._console.summary(self._alarms.raised)
            self._metrics.close()
            self._samples.close()
        if self._endpoint is not None:
            self._endpoint.close()


class SilentRecorder:
    """The recorder of all other ranks: it prints notes to the rank's log and drops everything else."""

    def begin(self, first_step: int, rollouts: Rollouts | None, problem: str | None = None) -> None:
        pass

    def keep_samples(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        pass

    def record(self, step: int, version: int, *parts: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, flush=True)

    def fail(self, error: UserError) -> None:
        pass

    def warn(self, text: str) -> None:
        self.note(f"warning: {text}")

    def end(self) -> None:
        pass


def rise_of_rate(history: Sequence[Mapping[str, float]], config: Config) -> tuple[float, float] | None:
    """Return the last learning rate of a run and the next one, if it rises after warm-up, or None.

    Args:
        history: the rows of metrics.jsonl.
    """
    if not history or "optimizer/lr" not in history[-1]:
        return None
    before, version = history[-1]["optimizer/lr"], int(history[-1]["version"])
    after = learning_rate(version, config.optimizer, planned_updates(config))
    return (before, after) if version >= config.optimizer.warmup_updates and after > before * (1 + 1e-9) else None


def _explained(sample: Sample) -> dict[str, Any]:
    """Return the reward's parts and the judge's reason, if there are any."""
    if not isinstance(sample.need, Ended):
        return {}
    found = {"parts": dict(sample.need.parts), "reason": sample.need.message}
    return {name: value for name, value in found.items() if value}


def turn_advantages(groups: Sequence[Group], batch: Batch) -> dict[str, list[float | None]]:
    """Return the advantage of each turn of the trained samples, by sample; None for a turn without a token.

    A batch has the groups' tokens in order, and all tokens of a turn have one advantage.
    """
    advantages_R = iter(batch.advantages_T[batch.sampled_T].tolist())
    return {
        sample.sample_id: [
            next(iter([next(advantages_R) for _ in turn]), None) for t in sample.trajectories for turn in t.turns
        ]
        for group in groups
        for sample in group.valid
    }


def sample_record(
    step: int, sample: Sample, decode: Callable[[Sequence[int]], str], advantages: Sequence[float | None] | None = None
) -> dict[str, Any]:
    """Return the line of `samples.jsonl` for a trained response; `decode` must keep special tokens.

    Segments are decoded separately, so a character that is split over two of them becomes a replacement character.
    `segments` and `response`, which is decoded as a whole, are the last trajectory's. If there are any, `branches` has
    the segments of the others with sampled tokens, and `turn_rewards` the rewards that came with an environment's
    answers. `advantage` is a number, or a list with one for each turn if they differ; `of` counts the step's samples.
    """
    prompt_ids = list(sample.prompt.token_ids)
    told = [t for t in sample.trajectories if t.num_sampled_tokens] or sample.trajectories[-1:]
    *branches, segments = (t.segments[t.segments[0].token_ids.tolist() == prompt_ids :] for t in told)
    rewards = [None if reward is None else total(reward) for reward in sample.turn_rewards]

    def shown(segments: Sequence[Segment]) -> list[dict[str, Any]]:
        return [{**s.origin.facts, "num_tokens": s.num_tokens, "text": decode(s.token_ids.tolist())} for s in segments]

    return {
        "step": step,
        "sample_id": sample.sample_id,
        "source": sample.prompt.source,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "response": decode([i for s in segments if s.origin != Given("prompt") for i in s.token_ids.tolist()]),
        "reward": sample.reward,
        **({"advantage": advantages[0] if len({*advantages}) == 1 else [*advantages]} if advantages else {}),
        **_explained(sample),
        "finish_reason": sample.finish_reason,
        "num_tokens": sample.num_sampled_tokens,
        **({"turn_rewards": rewards} if any(reward is not None for reward in rewards) else {}),
        **({"branches": [shown(branch) for branch in branches]} if branches else {}),
        "segments": shown(segments),
    }
