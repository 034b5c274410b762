"""Settings of what a run shows, keeps and tells others."""

from typing import Literal

from pydantic import Field, PositiveFloat

from bapo_megatron.config.base import Section

SinkName = Literal["tensorboard", "wandb"]


class MonitorConfig(Section):
    """Progress, alarms, reports and metric sinks."""

    progress: Literal["auto", "bar", "lines"] = "auto"
    """auto: a progress bar in a terminal, plain lines elsewhere."""
    samples_per_step: int = Field(2, ge=0)
    """Trajectories written to samples.jsonl each step."""
    report: bool = True
    """Write report.html at the end of the run."""
    mismatch_alarm: PositiveFloat | None = None
    """Warn where engine and trainer differ by more than this in the log-probs of the same weights (mean |difference| of
    an update, nats); the run goes on. Unset: 0.001 with float32, 0.05 with bfloat16; 1e9 is never."""

    token_profile: bool = False
    """Write, for ten bins of a token's probability, ratios, entropy and clipping (profile/*): sixty numbers a step."""

    grad_norm_alarm: PositiveFloat | None = None
    """Warn of an update whose gradient norm, before clipping, is over this. Unset: only grad_spike."""
    grad_spike: float = Field(10.0, gt=1)
    """Warn of an update whose gradient norm is over this multiple of the median of the (up to 101) norms before it,
    once there are 11; 1e9 is never."""

    sinks: tuple[SinkName, ...] = ()
    """Destinations of metrics besides metrics.jsonl, which is always written first. tensorboard: the run's folder
    `tensorboard`; wandb: Weights & Biases. A failing sink is reported once, counted, and never stops the run."""
    wandb_project: str = "bapo-megatron"
    """wandb: project of the run. Its own environment variables set the rest: WANDB_ENTITY, WANDB_MODE (offline writes
    to the run's folder `wandb` only), and WANDB_API_KEY, unless `wandb login` keeps the key."""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Serve the latest metrics, engines and GPUs to Prometheus on this port of trainer rank 0's machine. 0: any free
    one, which the log names. Unset: no endpoint."""
    prometheus_host: str = "127.0.0.1"
    """Address that the endpoint listens on; "0.0.0.0" is all interfaces. It has no password."""
    stall_timeout_s: PositiveFloat | None = None
    """Report where each trainer rank stands when it has done nothing for this long, or this and
    rollout.request_timeout_s while it waits for engines; the run goes on. Unset: half of parallel.timeout_s, so that
    the report comes before a collective gives up. 1e9 is never."""
    straggler_ratio: float = Field(1.5, gt=1)
    """Warn of a trainer rank whose own passes take over this multiple of the median rank's in 3 of 5 steps; 1e9 is
    never."""

    def mismatch_limit(self, dtype: str) -> float:
        """Return `mismatch_alarm`, or a limit that float32 and bfloat16 never reach while engine and trainer agree."""
        if self.mismatch_alarm is not None:
            return self.mismatch_alarm
        return 1e-3 if dtype == "float32" else 0.05
