"""The endpoint for Prometheus."""

import re
import socket
import time
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from bapo_megatron.engines.base import EngineState
from bapo_megatron.errors import ConfigError
from bapo_megatron.metrics import MAX_REWARD_PARTS, METRICS, RewardParts
from bapo_megatron.monitor.prometheus import (
    COUNTERS,
    LAST_STEP,
    PrometheusEndpoint,
    RunCollector,
    prometheus_name,
    prometheus_names,
)
from bapo_megatron.runtime.heartbeat import Heartbeat
from tests.distributed import HANG_S


def scrape(url: str) -> dict[str, float]:
    """Return samples by name and labels."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=HANG_S) as reply:
        lines = reply.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_the_endpoint_serves_the_latest_of_each_metric_and_counts() -> None:
    endpoint, began_s = PrometheusEndpoint("demo", 0, Heartbeat()), time.time()
    try:
        collector = endpoint.collector
        collector.engine_states = lambda: [EngineState("http://a:1", True, False, 7, 3, 2)]
        collector.record({"step": 1, "eval/reward": 0.25, "train/tokens": 100.0, "time/step_s": 2.0})
        collector.record({"step": 2, "train/tokens": 50.0, "rollout/tokens_generated": 30.0, "my/own-metric": 1.5})
        ended_s, found = time.time(), scrape(endpoint.url)
    finally:
        endpoint.close()
    assert found['bapo_step{run="demo"}'] == 2
    assert found['bapo_eval_reward{run="demo"}'] == 0.25, "from the step before"
    assert found['bapo_time_step_seconds{run="demo"}'] == 2
    assert found['bapo_my_own_metric{run="demo"}'] == 1.5
    assert found['bapo_trained_tokens_total{run="demo"}'] == 150
    assert found['bapo_generated_tokens_total{run="demo"}'] == 30
    assert found['bapo_steps_total{run="demo"}'] == 2
    engine = {name: found[f'bapo_engine_{name}{{engine="http://a:1",run="demo"}}'] for name in ("up", "live")}
    assert engine == {"up": 1, "live": 0}
    assert found['bapo_engine_weight_version{engine="http://a:1",run="demo"}'] == 7
    assert found['bapo_engine_running_requests{engine="http://a:1",run="demo"}'] == 3
    assert began_s <= found['bapo_last_step_timestamp_seconds{run="demo"}'] <= ended_s


def test_names_are_valid_and_different() -> None:
    names = {prometheus_name(metric) for metric in METRICS}
    assert len(names) == len(METRICS)
    assert all(name.replace("_", "").isalnum() and name.startswith("bapo_") for name in names)
    assert prometheus_name("train/tokens_per_s") == "bapo_train_tokens_per_second"


ODD = st.text('ab.-_/ \n\x1b"', min_size=1, max_size=6)


@given(st.sets(ODD | st.sampled_from([*METRICS, *COUNTERS, "run", LAST_STEP])))
def test_no_two_metrics_share_a_name_and_no_name_forges_a_line(metrics: set[str]) -> None:
    collector, registry = RunCollector("x", Heartbeat()), CollectorRegistry()
    collector.record(dict.fromkeys(metrics, 1.5))
    registry.register(collector)
    text = generate_latest(registry).decode()
    lines = text.splitlines()
    assert all(re.fullmatch(r"# (HELP|TYPE) \w+ .*|\w+(\{.*\})? [-+.e0-9]+", line) for line in lines)
    assert "\x1b" not in text
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert len([line for line in lines if line.endswith(" 1.5") and "_total{" not in line]) == len(metrics)
    assert all(prometheus_names(metrics)[prometheus_name(metric)] == metric for metric in metrics & {*METRICS})


def test_a_run_keeps_a_bounded_number_of_well_formed_parts() -> None:
    parts = RewardParts([{"reward/early/mean": 1.0}])
    hostile = {f"reward/{name}/mean": 1.0 for name in ("\x1b]0;owned\x07", "a b", "ä", "a/b", "", "a\n", "x" * 65, ".")}
    many = {f"reward/part.{number}-a/mean": 1.0 for number in range(1000)}
    assert parts.left_out({"loss/mine": 1.0, "reward/mean": 1.0} | hostile) == [*hostile]
    assert parts.left_out(many) == [*many][MAX_REWARD_PARTS - 1 :]
    assert parts.left_out(many) == [*many][MAX_REWARD_PARTS - 1 :]
    assert parts.left_out({"reward/early/mean": 0.0}) == []


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"monitor.prometheus_port={port}: cannot listen on 127.0.0.1"):
            PrometheusEndpoint("demo", port, Heartbeat())
