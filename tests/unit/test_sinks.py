"""Sinks hold what metrics.jsonl holds, each step once, over a resumed attempt; their failures do not spread."""

import io
import math
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import install_command
from bapo_megatron.monitor import sinks
from bapo_megatron.monitor.console import Console
from bapo_megatron.monitor.record import Recorder
from bapo_megatron.monitor.sinks import SINKS, BackgroundSink, TensorBoardSink
from bapo_megatron.preflight.checks import monitor
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.steps import read_metrics
from tests.distributed import HANG_S


@pytest.fixture(autouse=True)
def offline_and_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work offline, with long deadlines: on a busy machine, TensorBoard and W&B take a minute each to start."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", f"{HANG_S:g}")
    monkeypatch.setattr(sinks, "WANDB_START_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(sinks, "CLOSE_TIMEOUT_S", HANG_S)  # W&B needs attempts in one process to take turns


Values = dict[str, list[tuple[int, float]]]  # by metric: steps and values, as they were written


class NoRollouts:
    """What a recorder asks of rollouts."""

    decode = staticmethod(str)
    engine_states = staticmethod(list)
    prompt_digests: ClassVar[dict[str, str]] = {}


def config_with(folder: Path, *settings: str) -> Config:
    return load_config(["demo"], [f"run.dir={folder}", "run.name=run", *settings])


def attempt(config: Config, run_dir: RunDir, first_step: int, *steps: tuple[int, float]) -> str:
    """Record (step, reward) pairs; return what the user saw."""
    screen = io.StringIO()
    recorder = Recorder(config, run_dir, Console("lines", config.train.num_steps, stream=screen))
    recorder.begin(first_step, NoRollouts())  # type: ignore[arg-type]
    for step, reward in steps:
        recorder.record(step, step, {"reward/mean": reward, "rollout/num_samples": 4.0, "time/step_s": math.nan})
    recorder.end()
    return screen.getvalue()


def from_jsonl(run: Path) -> Values:
    found: Values = defaultdict(list)
    for row in read_metrics(run / "metrics.jsonl"):
        for name, value in row.items():
            if math.isfinite(value):
                found[name].append((int(row["step"]), value))
    return found


def from_tensorboard(run: Path) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def from_wandb(run: Path) -> Values:
    """Return values from the files that `wandb sync` would send: protobuf records in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: Values = defaultdict(list)
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.stem for file in files}) == 1, "all attempts are one W&B run"
    for file in files:
        for data in leveldb_records(file.read_bytes()[7:], offset=7):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {".".join([i.key, *i.nested_key]).strip("."): float(i.value_json) for i in record.history.item}
                for name, value in items.items():
                    found[name].append((int(items["_step"]), value))
    return found


def leveldb_records(data: bytes, offset: int) -> list[bytes]:
    """Return a log's records: 32 KiB blocks of pieces with checksum, length, kind (1 whole, 2 first, 3 mid, 4 last)."""
    found, piece, at = [], b"", 0
    while at + 7 <= len(data):
        room = 32768 - (at + offset) % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(piece)
            piece = b""
    return found


READERS: dict[str, Callable[[Path], Values]] = {
    "jsonl": from_jsonl,
    "tensorboard": from_tensorboard,
    "wandb": from_wandb,
}


def test_every_sink_is_under_contract_and_says_how_it_is_installed() -> None:
    assert READERS.keys() - {"jsonl"} == SINKS.keys() == monitor.PACKAGES.keys() - {"prometheus"}


@pytest.mark.parametrize("name", READERS)
def test_each_step_is_there_once_after_a_resume(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("WANDB_API_KEY", key)
    config = config_with(tmp_path, *([f'monitor.sinks=["{name}"]'] if name != "jsonl" else []))
    with RunDir.open(config) as run_dir:
        seen = attempt(config, run_dir, 0, (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4))
    with RunDir.open(config) as run_dir:
        seen += attempt(config, run_dir, 2, (3, 0.35), (4, 0.45), (5, 0.5))
    assert "warning" not in seen
    values, deadline = READERS[name](run_dir.path), time.monotonic() + HANG_S
    while len(values["reward/mean"]) < 5 and time.monotonic() < deadline:  # W&B's own process writes the last lines
        time.sleep(0.2)
        values = READERS[name](run_dir.path)
    again = [0.3, 0.4] if name == "wandb" else [0.35, 0.45]  # W&B only appends: what it got first stays
    expected = list(zip(range(1, 6), [0.1, 0.2, *again, 0.5], strict=True))
    assert [(step, pytest.approx(value)) for step, value in values["reward/mean"]] == expected
    assert "time/step_s" not in values, "values that are not finite are left out"
    assert [row["reward/mean"] for row in read_metrics(run_dir.metrics_path)] == [0.1, 0.2, 0.35, 0.45, 0.5]
    assert not [f for f in run_dir.path.rglob("*") if f.is_file() and key.encode() in f.read_bytes()]
    assert key not in seen


class Picky:
    """A sink that fails at step 2."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError("no route to host\nand much more")
        self.steps.append(step)

    def close(self) -> None:
        raise RuntimeError("closing twice")


def test_a_failure_is_told_once_counted_and_the_next_step_is_written() -> None:
    told: list[str] = []
    picky = Picky()
    sink = BackgroundSink("picky", lambda: picky, told.append)
    for step in (1, 2, 3):
        sink.write(step, {"reward/mean": 0.5})
    sink.close()
    assert picky.steps == [1, 3]
    assert sink.num_errors == 2, "one step, and the end"
    assert told == [
        "monitor.sinks: picky: step 2 is lost: ConnectionError: no route to host; the run continues, its metrics are "
        "in metrics.jsonl"
    ]


def test_a_sink_that_cannot_be_opened_or_hangs_holds_nothing_up() -> None:
    def refuse() -> Picky:
        raise ValueError("api_key not configured")

    told: list[str] = []
    closed = BackgroundSink("closed", refuse, told.append)
    closed.write(1, {})
    closed.close()
    assert closed.num_errors == 2
    assert "api_key not configured" in told[0]

    release = threading.Event()

    def hang() -> Picky:
        release.wait(HANG_S)
        return Picky()

    stuck = BackgroundSink("stuck", hang, told.append)
    stuck.write(1, {})
    stuck.close(timeout_s=0.2)
    assert "sink-stuck" in {thread.name for thread in threading.enumerate()}, "it was not waited for"
    assert "did not end within 0.2 s" in told[-1]
    release.set()


def test_a_broken_sink_is_in_the_metrics_and_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TensorBoardSink, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(TensorBoardSink, "write", broken)
    config = config_with(tmp_path, 'monitor.sinks=["tensorboard"]')
    with RunDir.open(config) as run_dir:
        seen = attempt(config, run_dir, 0, *((step, 0.5) for step in range(1, 5)))
        assert seen.count("warning: monitor.sinks: tensorboard: step 1 is lost: OSError: disk full") == 1
        counts = [row["monitor/sink_errors"] for row in read_metrics(run_dir.metrics_path)]
    assert counts == sorted(counts), "counted since the attempt began; the sink's thread lags behind"
    assert counts[0] == 0


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [
        ('monitor.sinks=["tensorboard"]', "tensorboard", "tensorboard"),
        ('monitor.sinks=["wandb"]', "wandb", "wandb"),
        ("monitor.prometheus_port=9400", "prometheus-client", "prometheus"),
    ],
)
def test_a_missing_package_is_told_before_anything_starts(
    settings: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_with(tmp_path, settings)
    assert list(monitor.check_monitor(config)) == []
    monkeypatch.setattr(monitor, "find_spec", lambda module: None)
    (violation,) = monitor.check_monitor(config)
    assert violation.severity == "error"
    assert f"the package {package} is not installed; run `{install_command(extra)}`" in violation.message
