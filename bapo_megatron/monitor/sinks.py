"""Additional outputs for metrics: TensorBoard and Weights & Biases. `metrics.jsonl` is written first and is complete.

A resumed run repeats the steps after its checkpoint, but no sink shows a step twice: TensorBoard hides the previous
attempt's values, as metrics.jsonl drops them; W&B, which only appends, keeps the first values.
"""

import contextlib
import functools
import json
import logging
import math
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol

from bapo_megatron.config.schema import Config, SinkName
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runtime.files import write_atomically

_WANDB_PROJECT = "bapo-megatron"
_MAX_WAITING = 1000  # number of steps by which a slow sink may lag behind
CLOSE_TIMEOUT_S = 60.0
WANDB_START_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receiver of each step's metrics. May raise any exception, and may be slow."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the finite metrics of step number `step`."""
        ...

    def close(self) -> None: ...


OpenSink = Callable[[Config, RunDir, int], Sink]
"""Opener of a sink for an attempt that continues after the given number of steps."""


class TensorBoardSink:
    """Event files in the run's folder `tensorboard`; TensorBoard reads the files of all attempts as one run."""

    def __init__(self, config: Config, run_dir: RunDir, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir.path / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def wandb_project() -> str:
    """Return the W&B project for runs in this environment."""
    return os.environ.get("WANDB_PROJECT", _WANDB_PROJECT)


class WandbSink:
    """One W&B run for all attempts; its id and last step are stored in the run's `wandb-run.json`."""

    def __init__(self, config: Config, run_dir: RunDir, first_step: int) -> None:
        import wandb

        self._path = run_dir.path / "wandb-run.json"
        state = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._id = state.get("id", uuid.uuid4().hex[:12])
        self._last_step = state.get("last_step", 0)
        self._remember()
        self._run = wandb.init(
            project=wandb_project(),
            name=config.run.name,
            id=self._id,
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
            dir=str(run_dir.path),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                init_timeout=WANDB_START_TIMEOUT_S,
            ),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._last_step:
            self._last_step = step
            self._remember()  # before sending: a crash in between loses a step rather than repeating it
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()

    def _remember(self) -> None:
        write_atomically(self._path, json.dumps({"id": self._id, "last_step": self._last_step}))


SINKS: dict[SinkName, OpenSink] = {"tensorboard": TensorBoardSink, "wandb": WandbSink}


class BackgroundSink:
    """A sink in its own thread. It logs and counts errors and reports the first one; the caller never waits.

    Args:
        warn: receives lines for the user, called in that thread.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink], warn: Callable[[str], None]) -> None:
        self.num_errors = 0
        self._name = name
        self._open = open_sink
        self._warn = warn
        self._steps: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step and return immediately."""
        try:
            self._steps.put_nowait((step, {k: float(v) for k, v in metrics.items() if math.isfinite(v)}))
        except queue.Full:
            self._failed(f"step {step} is lost: {_MAX_WAITING} steps are already waiting")

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until the queued steps are written, for at most `timeout_s`; None means a minute."""
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        with contextlib.suppress(queue.Full):  # the thread is stuck: the join below reports it
            self._steps.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._failed(f"did not end within {timeout_s:g} s")

    def _run(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._open()
        except Exception as error:  # an error in third-party code must not end the run
            self._failed(f"cannot be opened and stays empty: {_one_line(error)}")
        while (item := self._steps.get()) is not None:
            if sink is None:
                self.num_errors += 1
                continue
            try:
                sink.write(*item)
            except Exception as error:
                self._failed(f"step {item[0]} is lost: {_one_line(error)}")
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            self._failed(f"cannot be closed: {_one_line(error)}")

    def _failed(self, what: str) -> None:
        self.num_errors += 1
        log.warning("sink %s: %s", self._name, what, exc_info=True)
        if self.num_errors == 1:
            self._warn(f"monitor.sinks: {self._name}: {what}; the run continues, its metrics are in metrics.jsonl")


def open_sinks(config: Config, run_dir: RunDir, first_step: int, warn: Callable[[str], None]) -> list[BackgroundSink]:
    """Open the sinks of `monitor.sinks` for an attempt that continues after `first_step` finished steps."""
    return [
        BackgroundSink(name, functools.partial(SINKS[name], config, run_dir, first_step), warn)
        for name in dict.fromkeys(config.monitor.sinks)
    ]


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}".rstrip(": ")
