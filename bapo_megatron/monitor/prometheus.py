"""The Prometheus endpoint of a run: latest metrics, counters, engines and last actions.

`monitor.prometheus_port` starts it on trainer rank 0. A scrape reads everything from memory. For facts about GPUs, use
NVIDIA's dcgm-exporter.
"""

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from bapo_megatron.engines.base import EngineState
from bapo_megatron.errors import ConfigError, escaped
from bapo_megatron.metrics import METRICS, declared
from bapo_megatron.runtime.heartbeat import Heartbeat
from bapo_megatron.runtime.web import GuardedHandler, GuardedServer
from bapo_megatron.version import __version__

_PREFIX = "bapo_"
_HOST = "127.0.0.1"  # the endpoint has no password
COUNTERS = {
    "steps": "steps since the attempt began",
    "trained_tokens": "response tokens trained since the attempt began, each counted once per pass",
    "generated_tokens": "tokens sampled by the engines since the attempt began",
}
LAST_STEP, LAST_ACTION = "last_step_timestamp_seconds", "seconds_since_last_action"
ENGINE_METRICS: dict[str, tuple[str, Callable[[EngineState], float]]] = {
    "engine_up": ("1 if the engine answers", lambda e: e.is_up),
    "engine_live": ("1 if the engine is asked for tokens, 0 if it is fenced off", lambda e: e.is_live),
    "engine_weight_version": ("weight version of the engine, -1 if unknown", lambda e: e.version),
    "engine_running_requests": ("requests being sampled by the engine", lambda e: e.num_running),
    "engine_waiting_requests": ("requests waiting in the engine", lambda e: e.num_waiting),
}


def prometheus_name(metric: str) -> str:
    """Return the Prometheus name of a metric in metrics.jsonl.

    Example: "time/step_s" is bapo_time_step_seconds, "train/tokens_per_s" is bapo_train_tokens_per_second.
    """
    name = "weight_version" if metric == "version" else metric
    if name.endswith("_per_s"):
        name = name.removesuffix("_s") + "_second"
    elif name.endswith("_s"):
        name = name.removesuffix("_s") + "_seconds"
    safe = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    return _PREFIX + safe


_TAKEN = {
    *(
        f"{_PREFIX}{name}{end}"
        for name in ("run", *COUNTERS, *ENGINE_METRICS)
        for end in ("", "_total", "_created", "_info")
    ),
    f"{_PREFIX}{LAST_STEP}",
    f"{_PREFIX}{LAST_ACTION}",
}  # by families that are not metrics of a step


def prometheus_names(metrics: Iterable[str]) -> dict[str, str]:
    """Return the metrics by Prometheus name.

    If several have the same, the declared one has it, or else the first in the alphabet; the others get a number that
    depends on their names alone. Example: "eval/a-b/reward" has bapo_eval_a_b_reward, "eval/a_b/reward"
    bapo_eval_a_b_reward_98788595.
    """
    found: dict[str, str] = {}
    for metric in sorted(metrics, key=lambda metric: (metric not in METRICS, metric)):
        name = prometheus_name(metric)
        if name in found or name in _TAKEN:
            name += f"_{zlib.crc32(metric.encode(errors='surrogatepass')):08x}"
        found.setdefault(name, metric)
    return found


class RunCollector(Collector):
    """The samples of a scrape, each labelled with the run's name (`run`)."""

    def __init__(self, run: str, heartbeat: Heartbeat) -> None:
        self.engine_states: Callable[[], Sequence[EngineState]] = list
        self._run = run
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._latest: dict[str, float] = {}
        self._counts = dict.fromkeys(COUNTERS, 0.0)
        self._last_step_s = time.time()  # Unix time

    def record(self, metrics: Mapping[str, float]) -> None:
        """Record a finished step. Metrics that it lacks, such as those from evaluations, keep their values."""
        with self._lock:
            self._latest.update(metrics)
            self._counts["steps"] += 1
            self._counts["trained_tokens"] += metrics.get("train/tokens", 0.0)
            self._counts["generated_tokens"] += metrics.get("rollout/tokens_generated", 0.0)
            self._last_step_s = time.time()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            latest, counts, last_step_s = dict(self._latest), dict(self._counts), self._last_step_s
        yield InfoMetricFamily(f"{_PREFIX}run", "the run", {"run": self._run, "version": __version__})
        for prometheus, name in prometheus_names(latest).items():
            known, shown = declared(name), escaped(name)
            text = f"{known.meaning} ({known.unit}; {shown})" if known else shown
            yield self._gauge(prometheus.removeprefix(_PREFIX), text, [((), latest[name])])
        for name, description in COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, description, labels=["run"])
            counter.add_metric([self._run], counts[name])
            yield counter
        yield self._gauge(LAST_STEP, "Unix time of the last step's end, or of the start", [((), last_step_s)])
        yield from self._engines()
        now_s, beats = self._heartbeat.clock(), self._heartbeat.beats()
        ages = [((role,), now_s - beat.at_s) for role, beat in beats.items()]
        yield self._gauge(LAST_ACTION, "time since the last action of a role of trainer rank 0", ages, "role")

    def _engines(self) -> Iterator[Metric]:
        states = self.engine_states()
        for name, (description, of) in ENGINE_METRICS.items():
            yield self._gauge(name, description, [((s.url,), float(of(s))) for s in states], "engine")

    def _gauge(
        self, name: str, description: str, values: Sequence[tuple[tuple[str, ...], float]], *labels: str
    ) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, description, labels=["run", *labels])
        for own, value in values:
            family.add_metric([self._run, *own], value)
        return family


class PrometheusEndpoint:
    """An HTTP server for a run's `collector`. It serves until it is closed.

    Raises:
        ConfigError: the endpoint cannot listen on the address.
    """

    def __init__(self, run: str, port: int, heartbeat: Heartbeat) -> None:
        self.collector = RunCollector(run, heartbeat)
        registry = CollectorRegistry()
        registry.register(self.collector)
        handler = type("_Handler", (GuardedHandler, MetricsHandler), {"registry": registry})
        try:
            self._server = GuardedServer(_HOST, port, handler)
        except OSError as error:
            raise ConfigError(
                f"monitor.prometheus_port={port}: cannot listen on {_HOST} ({error.strerror or error}); set another "
                "port, or 0 for any free one"
            ) from error
        self.url = f"http://{_HOST}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
