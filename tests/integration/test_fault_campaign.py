"""A seeded campaign of faults on real engines, in every mode: no token is trained that is not what it claims to be."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integration.campaign import Campaign, Fault, Timeouts
from tests.integration.campaign_faults import JUDGE, PUSHES, REPLIES, SAMPLING
from tests.integration.nursery import Nursery

LEGS: dict[str, dict[str, Any]] = {
    "rounds": {},
    "rounds, 9": {"tokens_per_round": 9},
    "tail": {"abort_tail": True},
    "tail, 9": {"abort_tail": True, "tokens_per_round": 9},
    "overlap": {"overlap": True},
    "overlap, 9": {"overlap": True, "tokens_per_round": 9},
    "both, 9": {"overlap": True, "abort_tail": True, "tokens_per_round": 9},
}
STEPS_PER_LEG = 7
LIMIT_S = 420.0  # a third of it on two idle cores
SEED = 5


class Embedded:
    """Starts embedded engines."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._nursery = Nursery()
        self._timeouts = timeouts

    def start(self, port: int, checkpoint: Path, version: str) -> int:
        arguments = ["--model-path", str(checkpoint), "--port", str(port), "--weight-version", version]
        arguments += ["--max-context", "64", "--max-running", "32", "--update-timeout-s", str(self._timeouts.sync_s)]
        return self._nursery.start(arguments)

    def end(self) -> None:
        self._nursery.end()


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    timeouts = Timeouts(request_s=4.0, sync_s=5.0, startup_s=60.0, step_s=90.0)
    starter = Embedded(timeouts)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as a trainer of one rank has it
    campaign = Campaign(starter, num_sites=3, folder=tmp_path, timeouts=timeouts)
    yield campaign
    campaign.close()
    starter.end()
    dist.destroy_process_group()


def deal(num_legs: int, seed: int) -> list[list[list[Fault]]]:
    """For each step of each leg: an event or spoilt replies, and in every other step a failing push."""
    rng = random.Random(seed)

    def shuffled(faults: Sequence[Fault], count: int) -> Iterator[Fault]:
        dealt = [fault for _ in range(count // len(faults) + 1) for fault in rng.sample(faults, len(faults))]
        return iter(dealt)

    num_steps = num_legs * STEPS_PER_LEG
    events, replies, pushes = (shuffled(faults, num_steps) for faults in (SAMPLING, REPLIES, PUSHES))
    steps = [[next(replies if i % 2 else events), *([next(pushes)] if i % 3 == 0 else [])] for i in range(num_steps)]
    return [steps[i : i + STEPS_PER_LEG] for i in range(0, num_steps, STEPS_PER_LEG)]


@pytest.mark.slow
def test_no_fault_makes_a_run_hang_lose_samples_or_train_what_is_not_as_claimed(
    campaign: Campaign, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    for (name, settings), plan in zip(LEGS.items(), deal(len(LEGS), SEED), strict=True):
        campaign.run_leg(name, settings, plan)
        assert time.monotonic() - began_s < LIMIT_S
    elapsed_s = time.monotonic() - began_s
    num_tokens, worst, betrayed = campaign.check_logprobs()
    with capsys.disabled():
        print(f"\n{campaign.table()}")
        print(
            f"{sum(campaign.hits.values())} faults in {elapsed_s:.0f} s, engines fenced {campaign.num_fenced} times; "
            f"{num_tokens} tokens are of their versions within {worst:.1g}, other weights betray {betrayed:.0%}"
        )
    kinds = {kind for _, kind in campaign.hits}
    expected = {fault.kind for fault in (*SAMPLING, *PUSHES, *REPLIES)} | set(JUDGE)
    assert kinds >= expected, f"never happened: {expected - kinds}"
    assert sum(campaign.hits.values()) >= 30
    assert len(campaign.trained) == len(LEGS) * STEPS_PER_LEG * 3 * 4
    assert betrayed > 0.9, "the oracle would not notice wrong weights"
