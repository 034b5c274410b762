"""The names of all metrics, and the file they are kept in.

One flat dict of floats per training step, written to `metrics.jsonl`. How to read each one: docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bapo_megatron.algorithms.token_profile import BINS, MEANS
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl


class Metric(NamedTuple):
    """What a number counts, and in which unit ("share" lies in 0..1)."""

    unit: str
    description: str


METRICS: dict[str, Metric] = {
    "step": Metric("steps", "training step, counted from 1"),
    "version": Metric("updates", "weight version after the step: optimizer updates so far"),
    "reward/mean": Metric("reward", "mean reward of the trained responses; with 0/1 rewards the pass rate"),
    "reward/std": Metric("reward", "standard deviation of the reward over the trained responses"),
    "reward/running_std": Metric("reward", "standard deviation of all shaped rewards so far: their divisor"),
    "reward/clipped_share": Metric("share", "trained responses whose scaled reward was beyond reward.clip"),
    "reward/timeouts": Metric("responses", "judged wrong because their verifier did not end, since the attempt began"),
    "reward/errors": Metric("responses", "judged wrong because their verifier failed, since the attempt began"),
    "reward/judged": Metric("responses", "responses with a verdict, since the attempt began"),
    "reward/pending": Metric("responses", "responses that wait for a verdict right now"),
    "reward/wait_s": Metric("s", "mean time from a response's end to its verdict, queueing included, over the step"),
    "rollout/num_groups": Metric("groups", "prompts whose responses were trained"),
    "rollout/num_samples": Metric("samples", "responses that were trained"),
    "rollout/num_rounds": Metric("rounds", "sampling rounds of the step"),
    "rollout/num_retries": Metric("requests", "generate requests repeated after a failed or malformed reply"),
    "rollout/num_stale_groups": Metric("groups", "groups dropped as older than max_staleness"),
    "rollout/num_dropped_groups": Metric("groups", "judged groups dropped as not worth training"),
    "rollout/num_fenced": Metric("times", "that an engine was fenced off, since the attempt began"),
    "rollout/response_tokens_mean": Metric("tokens", "mean length of a trained response"),
    "rollout/response_tokens_max": Metric("tokens", "length of the longest trained response"),
    "rollout/truncated_share": Metric("share", "trained responses that ended at max_response_tokens"),
    "rollout/resumed_token_share": Metric("share", "trained tokens sampled in a later step than their response began"),
    "rollout/zero_variance_share": Metric("share", "groups whose responses all got the same reward"),
    "rollout/tokens_generated": Metric("tokens", "tokens the engines sampled since the batch before"),
    "rollout/tokens_per_s": Metric("tokens/s", "sampled tokens per second of wall-clock time, training included"),
    "staleness/mean": Metric("updates", "mean age of the trained tokens"),
    "staleness/max": Metric("updates", "age of the oldest trained token"),
    "bapo/low": Metric("ratio", "lower clip bound, mean over the step's updates"),
    "bapo/high": Metric("ratio", "upper clip bound, mean over the step's updates"),
    "bapo/positive_share": Metric("share", "contribution of positive tokens (rho) at the bounds that were used"),
    "bapo/saturated_share": Metric("share", "searches that reached their limits before their target"),
    "bapo/inert_share": Metric("share", "searches whose bounds stayed at their start"),
    "bapo/num_moves": Metric("moves", "grid steps of both bounds per search"),
    "loss/policy": Metric("loss", "policy loss per trained token"),
    "loss/entropy": Metric("nats", "mean entropy of the policy at the trained tokens"),
    "loss/clip_high_share": Metric("share", "trained tokens with A > 0 and a ratio over the upper bound"),
    "loss/clip_low_share": Metric("share", "trained tokens with A < 0 and a ratio under the lower bound"),
    "loss/dual_clip_share": Metric("share", "trained tokens with A < 0 whose loss the dual clip bounds"),
    "loss/positive_token_share": Metric("share", "trained tokens with A > 0"),
    "loss/negative_token_share": Metric("share", "trained tokens with A < 0"),
    "loss/positive_mass": Metric("loss", "what tokens with A > 0 contribute to the objective, per trained token"),
    "loss/negative_mass": Metric("loss", "what tokens with A < 0 take from the objective, per trained token"),
    "loss/ratio_mean": Metric("ratio", "mean of current over behaviour (or proximal) probability"),
    "loss/ratio_max": Metric("ratio", "largest ratio of a trained token"),
    "loss/approx_kl": Metric("nats", "estimated KL divergence from the behaviour policy to the current one"),
    "loss/importance_weight_mean": Metric("weight", "mean truncated importance weight of a trained token"),
    "loss/importance_capped_share": Metric("share", "trained tokens whose importance weight is at its cap"),
    "loss/kl_reference": Metric("nats", "KL from the policy to the reference per trained token, by loss.kl_estimator"),
    "loss/kl_coef": Metric("weight", "weight of that KL in the loss, mean over the step's updates"),
    "entropy_rule/covariance": Metric(
        "nats", "Cov(log pi, A X) over trained tokens; positive: the update lowers entropy"
    ),
    "entropy_rule/covariance_age_0": Metric("nats", "part of that by tokens of age 0"),
    "entropy_rule/covariance_age_1_3": Metric("nats", "part of that by tokens of ages 1 to 3"),
    "entropy_rule/covariance_age_4_up": Metric("nats", "part of that by tokens of age 4 and above"),
    "entropy_rule/positive_high": Metric("share", "trained tokens with A > 0 and a probability over exp(-entropy)"),
    "entropy_rule/positive_high_clipped": Metric("share", "those of them that are clipped, of all trained tokens"),
    "entropy_rule/positive_high_age_0": Metric("share", "those of age 0, of all trained tokens"),
    "entropy_rule/positive_high_age_1_3": Metric("share", "those of ages 1 to 3, of all trained tokens"),
    "entropy_rule/positive_high_age_4_up": Metric("share", "those of age 4 and above, of all trained tokens"),
    "entropy_rule/positive_low": Metric("share", "trained tokens with A > 0 and a probability under exp(-entropy)"),
    "entropy_rule/positive_low_clipped": Metric("share", "those of them that are clipped, of all trained tokens"),
    "entropy_rule/positive_low_age_0": Metric("share", "those of age 0, of all trained tokens"),
    "entropy_rule/positive_low_age_1_3": Metric("share", "those of ages 1 to 3, of all trained tokens"),
    "entropy_rule/positive_low_age_4_up": Metric("share", "those of age 4 and above, of all trained tokens"),
    "entropy_rule/negative_high": Metric("share", "trained tokens with A < 0 and a probability over exp(-entropy)"),
    "entropy_rule/negative_high_clipped": Metric("share", "those of them that are clipped, of all trained tokens"),
    "entropy_rule/negative_high_age_0": Metric("share", "those of age 0, of all trained tokens"),
    "entropy_rule/negative_high_age_1_3": Metric("share", "those of ages 1 to 3, of all trained tokens"),
    "entropy_rule/negative_high_age_4_up": Metric("share", "those of age 4 and above, of all trained tokens"),
    "entropy_rule/negative_low": Metric("share", "trained tokens with A < 0 and a probability under exp(-entropy)"),
    "entropy_rule/negative_low_clipped": Metric("share", "those of them that are clipped, of all trained tokens"),
    "entropy_rule/negative_low_age_0": Metric("share", "those of age 0, of all trained tokens"),
    "entropy_rule/negative_low_age_1_3": Metric("share", "those of ages 1 to 3, of all trained tokens"),
    "entropy_rule/negative_low_age_4_up": Metric("share", "those of age 4 and above, of all trained tokens"),
    **{f"{name}_share": Metric("share", "trained tokens in a bin of current probability") for name in BINS},
    **{f"{name}_{v}": Metric(unit, f"mean {v} of that bin's tokens") for name in BINS for v, unit in MEANS.items()},
    "mismatch/logprob_mean": Metric("nats", "mean |engine's - trainer's log-prob| of trained tokens of age 0"),
    "mismatch/logprob_p99": Metric("nats", "99th percentile of the same, within 1.2 %"),
    "mismatch/logprob_max": Metric("nats", "largest of the same"),
    "mismatch/kl": Metric("nats", "estimated KL divergence from the engine's policy to the trainer's, same tokens"),
    "mismatch/tokens": Metric("tokens", "trained tokens of age 0 that were compared"),
    "mismatch/alarms": Metric("updates", "updates of the step whose mean was over monitor.mismatch_alarm"),
    "critic/loss": Metric("loss", "value loss per trained token: half the squared distance from the return"),
    "critic/explained_variance": Metric("share", "of the returns' variance that the values predicted, before learning"),
    "critic/value_mean": Metric("reward", "mean value of the trained tokens, before learning"),
    "critic/return_mean": Metric("reward", "mean return of the trained tokens"),
    "critic/advantage_std": Metric("reward", "standard deviation of the trained tokens' advantages before whitening"),
    "critic/clip_share": Metric("share", "trained tokens whose value loss was clipped"),
    "critic/grad_norm": Metric("norm", "global gradient norm of the critic before clipping"),
    "critic/lr": Metric("rate", "learning rate of the critic's last update"),
    "critic/skipped": Metric("updates", "updates of the critic skipped because of a gradient that was not finite"),
    "optimizer/grad_norm": Metric("norm", "global gradient norm before clipping"),
    "optimizer/grad_norm_max": Metric("norm", "the same, largest of the step's updates"),
    "optimizer/grad_alarms": Metric("updates", "updates of the step whose gradient norm spiked (monitor.grad_*)"),
    "optimizer/lr": Metric("rate", "learning rate of the step's last update"),
    "optimizer/skipped": Metric("updates", "updates skipped because of a gradient that was not finite"),
    "time/step_s": Metric("s", "the whole step"),
    "time/rollout_s": Metric("s", "waiting for finished responses and their rewards"),
    "time/critic_s": Metric("s", "values, token advantages and the critic's updates"),
    "time/score_s": Metric("s", "log-probs at the current weights and the search for bounds"),
    "time/train_s": Metric("s", "forward, backward and optimizer"),
    "time/sync_s": Metric("s", "handing the new weights to the engines"),
    "time/eval_s": Metric("s", "evaluating"),
    "time/other_s": Metric("s", "the rest: packing, checkpoint, logging"),
    "straggler/ratio": Metric(
        "ratio", "own time of the slowest rank over the median rank's: until gradients are summed"
    ),
    "straggler/rank": Metric("rank", "which trainer rank was the slowest"),
    "straggler/slowest_s": Metric("s", "own time of the slowest rank's forward and backward passes"),
    "straggler/median_s": Metric("s", "the same, of the median rank"),
    "sync/bytes": Metric("bytes", "weights sent to each engine"),
    "sync/seconds": Metric("s", "duration of the weight update, the sum of its stages"),
    "sync/pause_s": Metric("s", "pausing the engines, and forming the group where its members changed"),
    "sync/gather_s": Metric("s", "gathering weights, as far as engines waited for it"),
    "sync/broadcast_s": Metric("s", "sending the weights and putting them in place"),
    "sync/verify_s": Metric("s", "comparing versions and checksums"),
    "sync/resume_s": Metric("s", "letting the engines go on"),
    "sync/generation_pause_s": Metric("s", "from all engines paused until all go on"),
    "train/tokens": Metric("tokens", "response tokens trained, each counted once per pass"),
    "train/tokens_per_s": Metric("tokens/s", "trained tokens per second of score and train time"),
    "ledger/queued": Metric("samples", "responses that wait for an engine"),
    "ledger/running": Metric("samples", "responses being sampled"),
    "ledger/partial": Metric("samples", "responses set aside, to be resumed"),
    "ledger/finished": Metric("samples", "responses complete but not trained yet"),
    "ledger/trained": Metric("samples", "responses trained since the run began"),
    "ledger/dropped": Metric("samples", "responses given up since the run began"),
    "eval/reward": Metric("reward", "mean reward on the evaluation prompts, at the weights after the step"),
    "eval/reward_stderr": Metric("reward", "standard error of eval/reward over the prompts"),
    "eval/best_of_group": Metric("reward", "mean over prompts of their best response's reward"),
    "eval/response_tokens_mean": Metric("tokens", "mean length of an evaluated response"),
    "eval/truncated_share": Metric("share", "evaluated responses that ended at max_response_tokens"),
    "eval/num_samples": Metric("samples", "responses that were evaluated"),
    "monitor/sink_errors": Metric("errors", "what went wrong in monitor.sinks since the attempt began"),
    "data/skipped": Metric("prompts", "prompts skipped as empty or too long since the run began"),
}


class MetricsWriter:
    """Appends one line per training step to `metrics.jsonl`. A context manager."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Append one step, flushed; values that are not finite are kept as null.

        Metrics that are not in `METRICS` are kept too: a plug-in may add its own.
        """
        assert "step" in metrics, "every line of metrics names its step"
        self._writer.write({**{name: float(value) for name, value in metrics.items()}, "step": int(metrics["step"])})

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The steps of a run in ascending order, null as NaN. Of a step that was written twice, the later line counts."""
    rows = {row["step"]: row for row in map(_as_floats, read_jsonl(path)) if "step" in row}
    return [rows[step] for step in sorted(rows)]


def _as_floats(record: Mapping[str, Any]) -> dict[str, float]:
    row = {name: math.nan if value is None else value for name, value in record.items()}
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
