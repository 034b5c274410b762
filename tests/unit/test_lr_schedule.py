"""The learning-rate schedule against tables and its properties."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.config.lr_schedule import learning_rate, planned_updates
from bapo_megatron.config.schema import Config, OptimizerConfig

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("options", "num_updates", "table"),
    [
        ({}, 3, [1, 1, 1, 1, 1]),
        ({"warmup_updates": 4}, 3, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"schedule": "linear"}, 5, [1, 0.75, 0.5, 0.25, 0, 0, 0]),
        ({"schedule": "linear", "min_lr_ratio": 0.2}, 5, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"schedule": "linear", "warmup_updates": 2}, 6, [0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        ({"schedule": "linear", "warmup_updates": 1}, 3, [1, 0.5, 0]),
        ({"schedule": "cosine"}, 5, [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0]),
        ({"schedule": "cosine", "min_lr_ratio": 0.5, "warmup_updates": 2}, 4, [0.5, 1, 0.75, 0.5, 0.5]),
        ({"schedule": "cosine", "min_lr_ratio": 1.0}, 3, [1, 1, 1, 1]),
        ({"schedule": "linear"}, 1, [1, 0]),
    ],
)
def test_tables(options, num_updates, table):
    optimizer = OptimizerConfig(lr=8.0, **options)
    rates = [learning_rate(n, optimizer, num_updates) for n in range(len(table))]
    assert rates == pytest.approx([8.0 * share for share in table], abs=1e-12)


def brute_force(schedule: str, warmup: int, num_updates: int, floor: float) -> list[float]:
    """Return shares of the peak, built by walking: up in equal steps, then down by each update's share."""
    rates = [(n + 1) / warmup for n in range(warmup)] or [1.0]
    num_down = num_updates - len(rates)
    for n in range(1, num_down + 1):
        taken = {"constant": 0.0, "linear": n / num_down, "cosine": math.sin(math.pi * n / num_down / 2) ** 2}
        rates.append(1 - (1 - floor) * taken[schedule])
    return rates


@settings(max_examples=200, deadline=None)
@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 30),
    num_down=st.integers(1, 60),
    floor=st.just(0.0) | st.floats(1e-6, 1),  # a smaller value can underflow when multiplied by lr
    lr=st.floats(1e-8, 10),
)
def test_properties(schedule, warmup, num_down, floor, lr):
    """Rates are as walked: up, then never up again; in range; at the peak once, and finally at the floor for good."""
    optimizer = OptimizerConfig(schedule=schedule, warmup_updates=warmup, min_lr_ratio=floor, lr=lr)
    num_updates = max(warmup, 1) + num_down
    rates = [learning_rate(n, optimizer, num_updates) / lr for n in range(num_updates + 3)]
    assert rates[:num_updates] == pytest.approx(brute_force(schedule, warmup, num_updates, floor), abs=1e-9)
    peak = max(warmup, 1) - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[peak] == pytest.approx(1)
    assert min(rates) > 0 or (floor == 0 and schedule != "constant")
    end = 1.0 if schedule == "constant" else floor
    assert rates[num_updates - 1 :] == pytest.approx([end] * 4, abs=1e-12)


def test_planned_updates_are_those_of_the_run_unless_given():
    train = {"num_steps": 7, "minibatches_per_step": 3, "epochs_per_step": 2}
    assert planned_updates(Config.model_validate({"train": train})) == 42
    assert planned_updates(Config.model_validate({"train": train, "optimizer": {"total_updates": 50}})) == 50
