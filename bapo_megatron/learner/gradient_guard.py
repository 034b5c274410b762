"""Alarms from the gradient norm of every update: spikes, and runs that no longer train."""

import math
from collections import deque
from statistics import median
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DivergedError
from bapo_megatron.types import Natural, Number

SPIKE = 10.0  # a norm over this many times the median of the norms before it raises the alarm
MAX_SKIPPED_IN_A_ROW = 20  # after this many consecutive skipped updates the run ends
_WINDOW = 101  # norms behind the median: long enough to outlast a spike, short enough to follow the run
_MIN_NORMS = 11  # before that the median says little, and the norms of a warm-up move by themselves


class SkipLimit:
    """A limit that ends a run which only skips updates and so learns nothing.

    Args:
        part: prefix of the settings and metrics: "optimizer" (for the policy) or "critic".
        max_in_a_row: consecutive skipped updates that end the run.
    """

    def __init__(self, part: str, max_in_a_row: int = MAX_SKIPPED_IN_A_ROW) -> None:
        self.num_in_a_row = 0
        self._part = part
        self._max_in_a_row = max_in_a_row

    def observe(self, norm: float) -> None:
        """Count one update by its gradient norm, the same on every rank.

        Raises:
            DivergedError: this norm and the norms of the updates before it were not finite.
        """
        self.num_in_a_row = 0 if math.isfinite(norm) else self.num_in_a_row + 1
        if self.num_in_a_row >= self._max_in_a_row:
            whose, losses = ("the critic's", "critic/loss") if self._part == "critic" else ("the", "loss/*")
            raise DivergedError(
                f"{whose} last {self.num_in_a_row} updates were skipped because their gradient was not "
                f"finite, so the run no longer learns: look at {self._part}/grad_norm and {losses} in "
                "metrics.jsonl, then `bapo branch` the run, from a checkpoint before the first skip, with a "
                f"lower {self._part}.lr"
            )


class GuardState(TypedDict):
    """The state of a `GradientGuard` in a checkpoint."""

    norms: list[Annotated[Number, Field(ge=0)]]
    skipped_in_a_row: Natural


class GradientGuard:
    """Watcher of the gradient norms before clipping; the same on every rank.

    An update raises the alarm if its norm is over `monitor.grad_norm_alarm`, or over 10 times the median of the up to
    101 finite norms before it, once there are 11. Spikes do not move a median. A norm that is not finite does not raise
    the alarm: its update is skipped and counted.
    """

    def __init__(self, config: Config, max_skipped_in_a_row: int = MAX_SKIPPED_IN_A_ROW) -> None:
        self._limit = config.monitor.grad_norm_alarm or math.inf
        self._skips = SkipLimit("optimizer", max_skipped_in_a_row)
        self._norms: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, norm: float) -> dict[str, float]:
        """Return the metrics of one update.

        Raises:
            DivergedError: see `SkipLimit`.
        """
        self._skips.observe(norm)
        if not math.isfinite(norm):
            return {"optimizer/grad_norm_max": norm, "optimizer/grad_alarms": 0.0}
        usual = median(self._norms) if len(self._norms) >= _MIN_NORMS else math.nan
        is_alarm = norm > self._limit or norm > SPIKE * usual  # nothing exceeds nan
        self._norms.append(norm)
        return {"optimizer/grad_norm_max": norm, "optimizer/grad_alarms": float(is_alarm)}

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {"norms": list(self._norms), "skipped_in_a_row": self._skips.num_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = deque(state["norms"], maxlen=_WINDOW)
        self._skips.num_in_a_row = state["skipped_in_a_row"]
