"""The time limit of a SLURM job."""

from collections.abc import Iterator

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.schema import Config, seconds_of


def check_time(config: Config, step_s: float | None) -> Iterator[Violation]:
    """Check the time limit against the seconds of a step, if they are known."""
    s, interval = config.slurm, config.checkpoint.interval_steps
    if s.time_limit is None:
        return
    limit_s = seconds_of(s.time_limit)
    if s.stop_before_end_s >= limit_s:
        yield Violation(
            ("slurm.stop_before_end_s", "slurm.time_limit"),
            f"slurm.stop_before_end_s={s.stop_before_end_s} is not below slurm.time_limit={s.time_limit}, so the run "
            "would be stopped as soon as it starts",
            f"set slurm.stop_before_end_s={max(1, limit_s // 4)}, or a longer limit",
        )
    elif step_s is not None:
        usable_s, needed_s = limit_s - s.stop_before_end_s, step_s * (interval or 1)
        if needed_s > limit_s:
            yield Violation(
                ("checkpoint.interval_steps", "slurm.time_limit"),
                f"slurm.time_limit={s.time_limit} is shorter than one checkpoint interval: checkpoint.interval_steps="
                f"{interval or 1} x {step_s:.0f} s a step = {needed_s:.0f} s",
                f"set checkpoint.interval_steps={max(1, int(usable_s / step_s))}, or a longer limit",
            )
        elif step_s > s.stop_before_end_s:
            yield warning(
                ("slurm.stop_before_end_s",),
                f"slurm.stop_before_end_s={s.stop_before_end_s} is shorter than a step of {step_s:.0f} s, at the end "
                "of which the run saves and stops",
                f"set slurm.stop_before_end_s={int(1.5 * step_s)}",
            )
