"""The bounds of scopes lagged and smoothed against a plain loop over every token of every earlier update."""

import json

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithms.bound_search import BoundSearch
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.errors import CheckpointError
from bapo_megatron.types import ClipBounds

NUM_UPDATES = 12
Tokens = tuple[Tensor, Tensor]  # ratios, advantages


def random_update(seed: int) -> Tokens:
    """Return tokens that want one end of the grid in even updates, and the other end in odd updates."""
    g = torch.Generator().manual_seed(seed)
    ratio = (0.5 * torch.randn(60, generator=g)).exp()
    return ratio, torch.randn(60, generator=g) + (0.5 if seed % 2 else -0.5)


def settings(scope: str, smoothing_updates: int = 4) -> ClipBoundConfig:
    return ClipBoundConfig.model_validate({"scope": scope, "rho0": 0.6, "smoothing_updates": smoothing_updates})


def literal_bounds(updates: list[tuple[float, Tokens]], config: ClipBoundConfig) -> tuple[float, float]:
    """Run Algorithm 1 over the tokens of all updates, each with the weight of its update."""
    lows, highs, i, j = config.low.points, config.high.points, 0, 0
    while True:
        positive = negative = 0.0
        for weight, (ratios, advantages) in updates:
            for r, a in zip(ratios.tolist(), advantages.tolist(), strict=True):
                positive += weight * r * a if a > 0 and r < highs[j] else 0.0
                negative += weight * r * -a if a < 0 and r > lows[i] else 0.0
        if positive / (positive + negative) >= config.rho0 or i == len(lows) - 1:
            return lows[i], highs[j]
        i, j = (i, j + 1) if j < len(highs) - 1 else (i + 1, j)


def observe(search: BoundSearch, update: Tokens) -> None:
    """Add an update in two micro-batches."""
    for ratio, advantages in zip(*(x.split(25) for x in update), strict=True):
        search.add(search.tabulate(ratio, advantages, torch.ones_like(ratio, dtype=torch.bool), None))
    search.finish_update()


def pair(bounds: ClipBounds | None) -> tuple[float, float]:
    assert bounds is not None
    return bounds.low, bounds.high


@pytest.mark.parametrize(("scope", "smoothing_updates"), [("lagged", 8), ("smoothed", 1), ("smoothed", 4)])
def test_bounds_are_those_of_a_plain_loop_over_earlier_updates(scope: str, smoothing_updates: int) -> None:
    config = settings(scope, smoothing_updates)
    calls: list[Tensor] = []
    search = BoundSearch(config, lambda table: calls.append(table) or table)
    assert search.search_past() is None
    decay = 0.0 if scope == "lagged" else 1 - 1 / smoothing_updates
    updates = [random_update(seed) for seed in range(NUM_UPDATES)]
    found = []
    for k, update in enumerate(updates):
        observe(search, update)
        want = literal_bounds([(decay ** (k - past), updates[past]) for past in range(k + 1)], config)
        assert pair(search.search_past()) == want
        assert search.metrics()["bapo/high"] == want[1]
        found.append(want)
    assert len(calls) == NUM_UPDATES, "one all-reduce per update"
    assert len(set(found)) > 1


def test_the_average_is_calmer_than_the_last_update() -> None:
    spread = {}
    for scope in ("lagged", "smoothed"):
        search = BoundSearch(settings(scope), lambda table: table)
        highs = []
        for seed in range(NUM_UPDATES):
            observe(search, random_update(seed))
            highs.append(pair(search.search_past())[1])
        spread[scope] = torch.tensor(highs[4:]).std().item()
    assert spread["smoothed"] < 0.8 * spread["lagged"]


def test_state_goes_through_a_checkpoint_bit_for_bit() -> None:
    search, resumed = (BoundSearch(settings("smoothed"), lambda table: table) for _ in range(2))
    for seed in range(5):
        observe(search, random_update(seed))
    resumed.load_state_dict(json.loads(json.dumps(search.state_dict())))
    for seed in range(5, 9):
        assert resumed.search_past() == search.search_past()
        assert resumed.state_dict() == search.state_dict()
        for each in (search, resumed):
            observe(each, random_update(seed))
    coarse = ClipBoundConfig.model_validate({"scope": "smoothed", "low": [0.6, 0.9, 0.1]})
    with pytest.raises(CheckpointError, match="table of bounds has 55 entries, not 43"):
        BoundSearch(coarse, lambda table: table).load_state_dict(search.state_dict())


@pytest.mark.parametrize("scope", ["lagged", "smoothed"])
def test_an_update_that_is_skipped_or_has_no_advantages_leaves_the_bounds_alone(scope: str) -> None:
    search = BoundSearch(settings(scope), lambda table: table)
    ratio, advantages = random_update(0)
    observe(search, (ratio, advantages))
    before = search.state_dict()
    observe(search, (ratio.index_fill(0, torch.tensor([3]), torch.nan), advantages))
    observe(search, (ratio, torch.zeros_like(advantages)))
    search.finish_update()
    assert search.state_dict() == before
