"""Clip-Cov, KL-Cov and the mask by entropy against sorting everything in plain Python; all in float64."""

import math
import random
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from write_selection_table import PAGE, filled_page

from bapo_megatron.algorithms.losses import LossInputs, ScoredTokens, TokenLoss
from bapo_megatron.algorithms.top_share import Selection, TopShare, UpdateMeans
from bapo_megatron.algorithms.update_rules import Again, NoBounds
from bapo_megatron.cli import main
from bapo_megatron.config.losses import LOSS_SECTIONS, Loss
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import ClipBoundConfig, RatioOptions, SelectingLoss
from bapo_megatron.errors import UserError
from bapo_megatron.learner.bounds import BoundsFinder
from tests.unit.loss_inputs import found_of, loss_inputs
from tests.unit.test_rivals import part_of

SELECTING = ("clip_cov", "kl_cov", "top_entropy")
VERSION = 7  # updates so far


def config_of(name: str, **options: Any) -> SelectingLoss:
    return LOSS_SECTIONS[name].model_validate({"name": name} | options)  # type: ignore[return-value]


def random_update(rng: random.Random) -> LossInputs:
    """Return 1 to 500 tokens; in every second update, few different values, so that most scores are equal."""
    num = rng.choice([1, 5, 50, 500])
    has_ties = rng.random() < 0.5

    def column(choices: list[float], low: float, high: float) -> Tensor:
        drawn = [rng.choice(choices) if has_ties else rng.uniform(low, high) for _ in range(num)]
        return torch.tensor(drawn, dtype=torch.float64)

    log_probs_R = column([-2.0, -1.0, -0.5], -3, 0)
    inputs = loss_inputs(
        log_probs_R=log_probs_R.requires_grad_(),
        behaviour_logprobs_R=log_probs_R.detach() + column([-0.3, 0.1, 0.3], -0.4, 0.4),
        advantages_R=column([-1.0, 0.0, 1.0], -2, 2),
        mask_R=torch.tensor([rng.random() < 0.9 for _ in range(num)]),
        entropy_R=column([0.0, 0.5, 1.0], 0, 3),
        bounds=None,  # type: ignore[arg-type]
    )
    batch = replace(inputs.batch, batch_rows_R=3 * inputs.batch.batch_rows_R + 11)
    return replace(inputs, batch=batch, ages_R=torch.full_like(batch.versions_R, VERSION))


def lot(place: int, version: int) -> float:
    """Return the lot of a place: SplitMix64 in signed 64-bit numbers, computed in Python."""

    def wrapped(number: int) -> int:
        return (number + 2**63) % 2**64 - 2**63

    number = wrapped(wrapped(version * -7046029254386353131) + place)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        number = wrapped((number ^ (number >> shift)) * factor)
    return ((number >> 31) % 2**24) / 2**24


def selected_by_sorting(inputs: LossInputs, config: Any, version: int = VERSION) -> set[int]:
    """Return the indices of the selected tokens: sort those with a score, first places first among equal scores."""
    batch = inputs.batch
    trained = batch.mask_R.nonzero().flatten().tolist()
    if not trained:
        return set()
    advantages, log_probs = batch.advantages_R.tolist(), inputs.log_probs_R.tolist()
    mean_a, mean_l = (math.fsum(column[i] for i in trained) / len(trained) for column in (advantages, log_probs))
    places, scores = batch.batch_rows_R.tolist(), {}
    for i in trained:
        score = (advantages[i] - mean_a) * (log_probs[i] - mean_l)
        if config.name == "top_entropy":
            score = float(inputs.entropy_R[i])
        elif config.name == "clip_cov":
            ratio = math.exp(log_probs[i] - float(batch.behaviour_logprobs_R[i]))
            is_clipped = ratio >= config.clip_high if advantages[i] > 0 else ratio <= config.clip_low
            if not config.covariance_low < score < config.covariance_high or (is_clipped and advantages[i]):
                continue
            score = lot(places[i], version)
        scores[i] = float(np.float32(score))
    k = math.floor(Fraction(str(config.share)) * len(trained))
    return set(sorted(scores, key=lambda i: (-scores[i], places[i]))[:k])


def literal_loss(inputs: LossInputs, config: Any, chosen: set[int]) -> tuple[float, Tensor]:
    """Return the loss of an update and its gradient, token by token."""
    loss, gradient_R = 0.0, torch.zeros_like(inputs.log_probs_R)
    for i in inputs.batch.mask_R.nonzero().flatten().tolist():
        log_ratio = float(inputs.log_probs_R[i].detach() - inputs.batch.behaviour_logprobs_R[i])
        ratio, advantage = math.exp(log_ratio), float(inputs.batch.advantages_R[i])
        if config.name == "kl_cov":
            penalty = config.penalty * (i in chosen)
            loss += penalty * abs(log_ratio) - ratio * advantage
            gradient_R[i] = penalty * float(np.sign(log_ratio)) - ratio * advantage
        elif (i in chosen) == (config.name == "top_entropy"):
            bounded = min(max(ratio, config.clip_low), config.clip_high) * advantage
            loss -= min(ratio * advantage, bounded)
            gradient_R[i] = -ratio * advantage * (ratio * advantage <= bounded)
    return loss, gradient_R


def split(inputs: LossInputs, rng: random.Random) -> list[LossInputs]:
    """Deal the tokens at random to up to eight micro-batches, of which some may be empty."""
    num_parts = rng.choice([1, 2, 4, 8])
    owner_R = torch.tensor([rng.randrange(num_parts) for _ in inputs.log_probs_R])
    return [part_of(inputs, owner_R == number) for number in range(num_parts)]


@pytest.mark.parametrize("name", SELECTING)
def test_any_split_selects_the_tokens_of_sorting_everything(name: str) -> None:
    """400 random updates: selected tokens, loss and gradient."""
    rng, num_sums = random.Random(name), set()
    for _ in range(400):
        inputs = random_update(rng)
        shares = [0.0002, 0.01, 0.29, 0.8, 1.0]
        band = {"covariance_low": 0.2, "covariance_high": 2.0} if name == "clip_cov" else {}
        config = config_of(name, share=rng.choice(shares), **band)
        chosen = selected_by_sorting(inputs, config)
        parts, tables = split(inputs, rng), []
        found = found_of(config, *parts, log=tables)
        num_sums.add(len(tables))
        assert (found.num_selected, found.means.num_tokens) == (len(chosen), int(inputs.batch.mask_R.sum()))
        got: set[int] = set()
        loss, gradient_R = 0.0, torch.zeros_like(inputs.log_probs_R)
        for part in parts:
            part = replace(part, found=found)
            indices_R = (part.batch.batch_rows_R - 11) // 3
            got |= set(indices_R[config.selected(part)].tolist())
            of_part = config.tokens(part).loss_R.sum()
            loss += float(of_part.detach())
            gradient_R[indices_R] = torch.autograd.grad(of_part, part.log_probs_R)[0]
        assert got == chosen
        wanted, wanted_R = literal_loss(inputs, config, chosen)
        assert loss == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(gradient_R, wanted_R, rtol=1e-9, atol=1e-9)
    assert max(num_sums) <= 4 if name == "clip_cov" else max(num_sums) == 7, "places decide between equal scores"


def test_the_first_places_win_among_equal_scores() -> None:
    config = config_of("kl_cov", share=0.4)
    inputs = loss_inputs(
        log_probs_R=torch.tensor([-1.0, -3.0, -2.0, -1.0, -5.0]),
        behaviour_logprobs_R=torch.zeros(5),
        advantages_R=torch.full((5,), 0.5),  # every covariance is 0 or -0
        mask_R=torch.tensor([False, True, True, True, True]),
        bounds=None,  # type: ignore[arg-type]
    )
    back = replace(inputs.batch, batch_rows_R=torch.tensor([4, 3, 2, 1, 0]))
    for batch, wanted in ((inputs.batch, [False, True, False, False, False]), (back, [False] * 4 + [True])):
        of_batch = replace(inputs, batch=batch)
        assert config.selected(replace(of_batch, found=found_of(config, of_batch))).tolist() == wanted


def test_a_whole_number_of_tokens_is_not_rounded_down_further() -> None:
    assert 0.29 * 100 < 29
    columns = dict.fromkeys(("behaviour_logprobs_R", "advantages_R"), torch.zeros(100))
    inputs = loss_inputs(
        log_probs_R=torch.zeros(100),
        mask_R=torch.ones(100, dtype=torch.bool),
        bounds=None,  # type: ignore[arg-type]
        **columns,
    )
    assert found_of(config_of("kl_cov", share=0.29), inputs).num_selected == 29


def test_every_update_draws_other_lots() -> None:
    """Lots are spread evenly over [0, 1), and do not depend on the lots of another version."""
    inputs = random_update(random.Random(0))
    num = 20_000
    zeros_R = torch.zeros(num, dtype=torch.int64)
    batch = replace(inputs.batch, batch_rows_R=torch.arange(num), versions_R=zeros_R)
    lots_2R = torch.stack([replace(inputs, batch=batch, ages_R=zeros_R + age).lots() for age in (3, 4)])
    counts = torch.histc(lots_2R[0], bins=20, min=0, max=1)
    assert ((counts - num / 20).abs() < 5 * math.sqrt(num / 20)).all()
    assert abs(float(torch.corrcoef(lots_2R)[0, 1])) < 5 / math.sqrt(num)
    older = replace(inputs, batch=replace(batch, versions_R=zeros_R - 2), ages_R=zeros_R + 5)
    assert (older.lots() == lots_2R[0]).all(), "the weights' version counts, not the tokens'"


def test_all_tokens_of_top_entropy_are_grpo() -> None:
    inputs = random_update(random.Random(3))
    config = config_of("top_entropy", share=1.0, clip_high=1.1)
    inputs = replace(inputs, found=found_of(config, inputs))
    grpo = LOSS_SECTIONS["grpo"].model_validate({"name": "grpo", "clip_high": 1.1})
    assert (config.tokens(inputs).loss_R == grpo.tokens(inputs).loss_R).all()


@pytest.mark.parametrize("name", SELECTING)
def test_masked_tokens_count_nowhere_and_weights_multiply(name: str) -> None:
    rng = random.Random(5)
    band = {"covariance_low": 0.2, "covariance_high": 2.0} if name == "clip_cov" else {}
    config = config_of(name, share=0.3, importance_cap=2.0, **band)
    inputs = next(each for each in iter(lambda: random_update(rng), None) if len(each.log_probs_R) == 50)
    kept_R, batch = inputs.batch.mask_R, inputs.batch
    noise_R = torch.where(kept_R, 0.0, math.nan)
    spoiled = replace(
        inputs,
        batch=replace(batch, advantages_R=batch.advantages_R + noise_R),
        log_probs_R=(inputs.log_probs_R.detach() + noise_R).requires_grad_(),
        entropy_R=inputs.entropy_R + noise_R,
    )
    losses = []
    for each in (inputs, spoiled):
        losses.append(config.tokens(replace(each, found=found_of(config, each))).loss_R)
        assert torch.autograd.grad(losses[-1].sum(), each.log_probs_R)[0].isfinite().all()
    assert (losses[0] == losses[1]).all()
    weight_R = torch.linspace(0.2, 3, 50, dtype=torch.float64)
    known = replace(
        batch,
        proximal_logprobs_R=batch.behaviour_logprobs_R,
        behaviour_logprobs_R=batch.behaviour_logprobs_R - weight_R.log(),
    )
    weighted = replace(inputs, batch=known)
    loss_R = config.tokens(replace(weighted, found=found_of(config, weighted))).loss_R
    torch.testing.assert_close(loss_R, losses[0] * weight_R.clamp(max=2.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SELECTING)
def test_a_nan_selects_nothing_by_covariance_and_spoils_the_loss(name: str) -> None:
    inputs = random_update(random.Random(1))
    config = config_of(name, share=0.5)
    trained = int(inputs.batch.mask_R.nonzero()[0])
    log_probs_R = inputs.log_probs_R.detach().clone()
    log_probs_R[trained] = math.nan
    inputs = replace(inputs, log_probs_R=log_probs_R.requires_grad_())
    inputs = replace(inputs, found=found_of(config, inputs))
    assert (inputs.found.num_selected == 0) == (name != "top_entropy")
    assert config.tokens(inputs).loss_R.sum().isnan()


def test_a_learner_without_entropies_is_refused() -> None:
    learner: Any = SimpleNamespace(
        version=0,
        score=lambda minibatch, with_entropy: [(torch.zeros(2), None)],
        sum_over_data_ranks=lambda table: table,
        sum_over_context=lambda table: table,
    )
    minibatch: Any = SimpleNamespace(micro_batches=(random_update(random.Random(0)).batch,))
    finder = BoundsFinder(Config.model_validate({"loss": {"name": "top_entropy"}}), learner)
    with pytest.raises(UserError, match=r'loss.name="top_entropy" selects tokens by their entropy, which SimpleNames'):
        finder.find(minibatch)


class OldestOptions(RatioOptions):
    share: float = 0.5

    def scores(self, tokens: ScoredTokens, means: UpdateMeans) -> Tensor:
        return tokens.ages_R


def only_oldest(inputs: LossInputs[Selection], options: OldestOptions) -> TokenLoss:
    selected_R = inputs.found.selected(options.scores(inputs, inputs.found.means), inputs.batch)
    return inputs.plain(-inputs.log_probs_R.where(selected_R, 0.0))


def entropic(inputs: LossInputs, options: dict[str, Any]) -> TokenLoss:
    return inputs.plain(-inputs.log_probs_R)


class EntropyRule(NoBounds):
    def table(self, values: ScoredTokens, so_far: Any) -> Tensor:
        assert values.entropy_R is not None
        return values.entropy_R.sum().double()


ONLY_OLDEST = Loss(only_oldest, rule=TopShare)
ASKS, FORGETS = Loss(entropic, rule=EntropyRule, reads_entropy=True), Loss(entropic, rule=EntropyRule)
ASKS_TOO_LATE = Loss(entropic, rule=EntropyRule, reads_entropy=True, reads="earlier updates")


@pytest.mark.parametrize(
    ("loss", "code", "message"),
    [
        ("ONLY_OLDEST", 0, ""),
        ("ASKS", 0, ""),
        ("FORGETS", 2, "fails on a made-up micro-batch of four tokens: AssertionError"),
        ("ASKS_TOO_LATE", 2, 'entropies of "earlier updates" are not kept: its rule needs reads="update"'),
    ],
)
def test_a_loss_of_the_users_own(loss: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "demo", f"loss.name={__name__}:{loss}"]) == code
    error = capsys.readouterr().err
    assert (message in error) if message else not error


def test_a_loss_of_the_users_own_selects_by_its_own_scores() -> None:
    inputs = random_update(random.Random(0))
    mask_R = torch.ones_like(inputs.batch.mask_R)
    inputs = replace(inputs, batch=replace(inputs.batch, mask_R=mask_R), ages_R=torch.arange(len(mask_R)) % 5)
    rule = TopShare(OldestOptions(share=0.4), ClipBoundConfig())
    found: Any = Again(None)
    while isinstance(found, Again):
        found = rule.decide(rule.table(inputs, found.so_far), found.so_far)
    loss_R = only_oldest(replace(inputs, found=found), rule.options).loss_R
    assert found.num_selected == int(0.4 * len(mask_R)) > 0
    assert ((loss_R != 0) == (inputs.ages_R >= 3)).all()


def test_the_table_of_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled_page(text), "run: python scripts/write_selection_table.py"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["loss.name=clip_cov"], "loss.share=0.0002 selects no token: an update has at most 3072 tokens"),
        (["loss.name=kl_cov"], "loss.share=0.0002 selects no token: an update has at most 3072 tokens"),
        (["loss.name=top_entropy", "loss.share=0"], "loss.share must be above 0, got 0"),
        (
            ["loss.name=clip_cov", "loss.share=0.01", "loss.covariance_low=6"],
            "loss.covariance_low must be below loss.covariance_high, as no token could be selected, got 6",
        ),
        (["loss.name=kl_cov", "loss.share=0.00033"], ""),
        (["loss.name=top_entropy"], ""),
    ],
)
def test_a_share_that_selects_no_token_is_refused(
    settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "demo", *settings]) == (2 if message else 0)
    error = capsys.readouterr().err
    assert (message in error) if message else not error
