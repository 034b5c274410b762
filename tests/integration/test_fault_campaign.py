"""A seeded campaign of faults on real engines, in every mode: every token that is trained is what it claims to be."""

import importlib.util
from pathlib import Path

import pytest

from tests.integration.campaign import Campaign
from tests.integration.campaign_answers import Turns
from tests.integration.campaign_faults import JUDGE, PUSHES, SAMPLING, SPOILT, spoilt
from tests.integration.campaign_runs import (
    ENVIRONMENT,
    Embedded,
    Plans,
    SGLang,
    chosen_deadlines,
    dense_plans,
    fight,
    opened,
)
from tests.integration.faulty_proxy import ROUTE_FAULTS
from tests.integration.vain import Vain

SEED = 5


@pytest.fixture
def vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vain:
    return chosen_deadlines(tmp_path, monkeypatch)


def shown(
    campaign: Campaign, plans: Plans, capsys: pytest.CaptureFixture[str], answers: tuple[str, ...] = JUDGE
) -> int:
    """Fight, show what happened, and return the number of faults."""
    found = fight(campaign, plans, answers)
    with capsys.disabled():
        print(f"\n{campaign.table()}\n{found}")
    return found["faults"]


@pytest.mark.slow
def test_no_fault_makes_a_run_hang_lose_samples_or_train_what_is_not_as_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vain: Vain
) -> None:
    with opened(Embedded(), 3, tmp_path, vain) as campaign:
        assert shown(campaign, dense_plans(SEED), capsys) >= 30
        assert campaign.kinds == {fault.kind for fault in (*SAMPLING, *PUSHES)} | {*SPOILT, *JUDGE}


@pytest.mark.slow
def test_environments_that_fail_under_fire(tmp_path: Path, capsys: pytest.CaptureFixture[str], vain: Vain) -> None:
    """Three cases of the long campaign (campaign_runs.py): in each mode, engines are killed and hang in mid-turn."""
    fault = {fault.kind: fault for fault in (*SAMPLING, *PUSHES)}
    plans = {
        "rounds, 9": [[fault["killed, restarted"]], [fault["push: torn, killed between buckets"]]],
        "tail": [[fault["hung until fenced"]], [fault["push: other weights"]]],
        "both, 9": [
            [fault["all killed, restarted"]],
            [fault["restarted unnoticed, older version"]],
            [spoilt("nan", 3)],
        ],
    }
    with opened(Embedded(), 2, tmp_path, vain, Turns) as campaign:
        assert shown(campaign, plans, capsys, ENVIRONMENT) >= 30


@pytest.mark.slow
def test_a_mixture_under_fire_trains_no_wrong_routes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vain: Vain
) -> None:
    """A part of the long campaign of routes: every kind of wrong routes, and engines that die, hang and restart."""
    fault = {fault.kind: fault for fault in (*SAMPLING, *PUSHES)}
    events = ("killed, restarted", "hung until fenced", "restarted unnoticed, older version")
    steps = [[spoilt(kind, 1)] for kind in ROUTE_FAULTS] + [[fault[kind]] for kind in events]
    steps[1].append(fault["push: torn, killed between buckets"])
    with opened(Embedded(), 2, tmp_path, vain, Turns, "moe") as campaign:
        assert shown(campaign, {"both, 9": steps}, capsys, ENVIRONMENT) >= 30
        assert campaign.refused == dict.fromkeys(ROUTE_FAULTS, 1)


@pytest.mark.slow
def test_real_sglang_servers_under_fire(tmp_path: Path, capsys: pytest.CaptureFixture[str], vain: Vain) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; scripts/install_sglang_cpu.sh does that")
    fault = {fault.kind: fault for fault in (*SAMPLING, *PUSHES)}
    plans = {
        "rounds, 9": [  # step i strikes server i % 2, its push the other one
            [spoilt("garbage", 1)],
            [fault["hung, then continues"]],
            [],
            [fault["aborted by a third party"]],
            [],
            [fault["paused by a third party"]],
            [],
            [],
        ],
        "both, 9": [
            [spoilt("nan", 1)],
            [fault["push: torn, killed between buckets"]],
            [],
            [fault["aborted by a third party"]],
            [],
        ],
    }
    with opened(SGLang(tmp_path), 2, tmp_path, vain) as campaign:
        assert shown(campaign, plans, capsys) >= 5
        assert campaign.kinds >= {*JUDGE}
