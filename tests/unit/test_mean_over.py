"""The mean of an update's loss (loss.mean_over) and the filter of its tokens, for any split, as in the formulas."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bapo_megatron.algorithms.clip_bounds import contribution_table
from bapo_megatron.algorithms.losses import LossInputs, outside_filter
from bapo_megatron.algorithms.objectives.clipped import BapoLoss, GrpoLoss
from bapo_megatron.algorithms.update_rules import UpdateRule, update_rule
from bapo_megatron.buffer.packing import Pass, Share
from bapo_megatron.config.losses import CustomLoss, Loss
from bapo_megatron.config.schema_loss import ClipBoundConfig, MeanOver
from bapo_megatron.errors import UserError
from bapo_megatron.types import Batch, ClipBounds, MicroBatch, MiniBatch
from tests.unit.loss_inputs import found_of

MAX_RESPONSE_TOKENS = 7
BOUNDS = ClipBounds(0.8, 1.2, math.nan, saturated=False, num_moves=0)

# a token: log pi - log pi_prox, log pi_prox - log pi_behaviour, whether it is trained
tokens = st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.sampled_from([True, True, True, False]))
updates = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(tokens, min_size=1, max_size=MAX_RESPONSE_TOKENS)), min_size=1, max_size=6
).filter(lambda update: any(trained for _, tokens in update for *_, trained in tokens))
Update = list[tuple[float, list[tuple[float, float, bool]]]]
splits = st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([6, 12, 1000]))
Split = tuple[int, int, int]  # data ranks, context ranks, tokens per micro-batch


def batch_of(update: Update) -> tuple[Batch, Tensor]:
    """Return the batch, each response after a prompt of two tokens, and log-probs [T] with gradient."""
    rows = [
        (advantage * is_sampled, *token, is_sampled)
        for advantage, tokens in update
        for is_sampled, token in [(False, (0.0, 0.0, False))] * 2 + [(True, token) for token in tokens]
    ]
    advantages_T, log_ratios_T, log_weights_T, mask_T, sampled_T = torch.tensor(rows, dtype=torch.float64).unbind(1)
    behaviour_T = torch.linspace(-3, -1, len(rows), dtype=torch.float64) * sampled_T
    batch = Batch(
        token_ids_T=torch.zeros(len(rows), dtype=torch.int64),
        seq_lens_S=torch.tensor([len(tokens) + 2 for _, tokens in update]),
        sampled_T=sampled_T.bool(),
        advantages_T=advantages_T,
        behaviour_logprobs_T=behaviour_T,
        versions_T=torch.zeros(len(rows), dtype=torch.int64),
        mask_T=mask_T.bool(),
        proximal_logprobs_T=behaviour_T + log_weights_T,
    )
    return batch, (behaviour_T + log_weights_T + log_ratios_T).requires_grad_()


def minibatches_of(batch: Batch, split: Split) -> list[list[MiniBatch]]:
    """Return the whole batch as one mini-batch, for each data rank and each of its context ranks."""
    data_size, context_size, max_tokens = split
    return [
        [
            next(Pass(Share(rank, data_size, part, context_size), max_tokens).minibatches(batch))
            for part in range(context_size)
        ]
        for rank in range(data_size)
    ]


def together(parts: list[Any], compute: Callable[[Any, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
    """Compute on context ranks; their tables are added up."""
    tables: list[list[Tensor]] = [[] for _ in parts]
    for part, mine in zip(parts, tables, strict=True):
        compute(part, lambda table, mine=mine: mine.append(table) or table)
    totals = [sum(column) for column in zip(*tables, strict=True)]
    results = []
    for part in parts:
        rest = iter(totals)
        results.append(compute(part, lambda _, rest=rest: next(rest)))
    return results


def inputs_of(
    batch: MicroBatch, log_probs_T: Tensor, mean_over: MeanOver, over_context: Callable[[Tensor], Tensor]
) -> LossInputs:
    log_probs_R = log_probs_T[batch.batch_rows_R]
    zeros_R = torch.zeros_like(batch.batch_rows_R)
    entropy_R = torch.zeros_like(log_probs_R.detach())
    return LossInputs(batch, log_probs_R, zeros_R, over_context, entropy_R=entropy_R, mean_over=mean_over, found=BOUNDS)


def parts_of(batch: Batch, split: Split) -> Iterator[list[MicroBatch]]:
    """Yield the context ranks' parts of each micro-batch."""
    for ranks in minibatches_of(batch, split):
        for parts in zip(*(minibatch.micro_batches for minibatch in ranks), strict=True):
            yield list(parts)


def literal_mean(losses: list[list[Tensor]], mean_over: MeanOver) -> Tensor:
    """Follow `agg_loss` of verl's core_algos.py, without the 1e-8 that it adds to a response's length."""
    if mean_over == "tokens":
        return torch.stack([x for one in losses for x in one]).sum() / sum(map(len, losses))
    if mean_over == "responses":
        return torch.stack([torch.stack(one).sum() / len(one) for one in losses]).sum() / len(losses)
    return torch.stack([x for one in losses for x in one]).sum() / len(losses) / MAX_RESPONSE_TOKENS


def divisor(minibatch: MiniBatch, mean_over: MeanOver) -> int:
    counts = {"tokens": minibatch.num_trained_tokens, "responses": minibatch.num_trained_responses}
    return counts.get(mean_over, minibatch.num_trained_responses * MAX_RESPONSE_TOKENS)


@settings(max_examples=400, deadline=None)
@given(update=updates, split=splits, mean_over=st.sampled_from(["tokens", "responses", "budget"]))
def test_any_split_has_the_mean_of_the_formula(update: Update, split: Split, mean_over: MeanOver) -> None:
    batch, log_probs_T = batch_of(update)
    config = GrpoLoss(proximal="learner")
    found = torch.zeros((), dtype=torch.float64)
    (number,) = {divisor(minibatch, mean_over) for ranks in minibatches_of(batch, split) for minibatch in ranks}

    def part_of_mean(part: MicroBatch, over_context: Callable[[Tensor], Tensor]) -> Tensor:
        inputs = inputs_of(part, log_probs_T, mean_over, over_context)
        loss_R, weight_R = config.tokens(inputs).loss_R, inputs.loss_weights()
        return (loss_R if weight_R is None else loss_R * weight_R).sum() / number

    for parts in parts_of(batch, split):
        found = found + sum(together(parts, part_of_mean))
    losses: list[list[Tensor]] = []
    for places in torch.arange(len(log_probs_T)).split(batch.seq_lens_S.tolist()):
        losses.append([])
        for t in places[batch.mask_T[places]].tolist():
            assert batch.proximal_logprobs_T is not None
            ratio = (log_probs_T[t] - batch.proximal_logprobs_T[t]).exp()
            weight = (batch.proximal_logprobs_T[t] - batch.behaviour_logprobs_T[t]).exp().clamp(max=2.0)
            advantage = batch.advantages_T[t]
            losses[-1].append(-weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    want = literal_mean([one for one in losses if one], mean_over)
    torch.testing.assert_close(found.detach(), want.detach(), rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(loss, log_probs_T)[0] for loss in (found, want)]
    ratio_T = (log_probs_T - batch.proximal_logprobs_T).detach().exp()
    is_off_T = (ratio_T - 0.8).abs().minimum((ratio_T - 1.2).abs()) > 1e-9
    torch.testing.assert_close(*(gradient_T[is_off_T] for gradient_T in gradients), rtol=1e-9, atol=1e-9)


@settings(max_examples=400, deadline=None)
@given(update=updates, split=splits, level=st.sampled_from(["token", "sequence", "geometric"]))
def test_any_split_filters_the_tokens_of_the_formula(update: Update, split: Split, level: str) -> None:
    batch, _ = batch_of(update)
    low, high = 0.71, 1.53
    config = GrpoLoss.model_validate({"filter_level": level, "filter_floor": low, "filter_cap": high})
    found_T = torch.zeros_like(batch.mask_T)
    for parts in parts_of(batch, split):
        filtered = together(parts, lambda part, over_context: outside_filter(part, config, over_context))
        for part, filtered_R in zip(parts, filtered, strict=True):
            found_T[part.batch_rows_R] = filtered_R
    want = []
    for _, tokens in update:
        want += [False, False]
        ratios = [math.exp(log_weight) for _, log_weight, trained in tokens if trained]
        product = math.prod(ratios)
        for _, log_weight, trained in tokens:
            mean = product ** (1 / max(len(ratios), 1))
            ratio = {"token": math.exp(log_weight), "sequence": product, "geometric": mean}[level]
            want.append(trained and not low <= ratio <= high)
    assert found_T.tolist() == want


@settings(max_examples=100, deadline=None)
@given(update=updates, split=splits)
def test_the_search_counts_the_gradients_of_the_mean_over_responses(update: Update, split: Split) -> None:
    """P and N at a bound are the gradients that the loss lets through there, times the number of responses."""
    batch, log_probs_T = batch_of(update)
    loss, bapo = BapoLoss(proximal="learner", mean_over="responses"), ClipBoundConfig()
    table = torch.zeros(update_rule(loss, bapo).shape, dtype=torch.float64)
    for parts in parts_of(batch, split):
        tables = together(
            parts,
            lambda part, over_context: update_rule(loss, bapo).table(
                inputs_of(part, log_probs_T.detach(), "responses", over_context), None
            ),
        )
        table = table + sum(tables)
    (whole,) = next(parts_of(batch, (1, 1, 1000)))
    sizes_T = batch.count_S(batch.mask_T).repeat_interleave(batch.seq_lens_S)
    ratios = inputs_of(whole, log_probs_T.detach(), "tokens", lambda table: table).ratios(loss)
    weights_R = ratios.weight_R / sizes_T[whole.batch_rows_R].clamp(min=1)
    want = contribution_table(
        ratios.ratio_R, whole.advantages_R, whole.mask_R, whole.behaviour_logprobs_R, bapo, weights_R
    )
    torch.testing.assert_close(table, want, rtol=1e-9, atol=1e-9)


def test_longer_failures_move_the_bounds_less_if_each_response_counts_once() -> None:
    update: Update = [(1.0, [(0.0, 0.0, True)]), (-1.0, [(0.0, 0.0, True)] * 6)]
    batch, log_probs_T = batch_of(update)
    (whole,) = next(parts_of(batch, (1, 1, 1000)))
    found = {
        over: found_of(BapoLoss(), inputs_of(whole, log_probs_T.detach(), over, lambda table: table))
        for over in ("tokens", "responses", "budget")
    }
    assert found["responses"].num_moves == 0 < found["tokens"].num_moves == found["budget"].num_moves


class _Uncounted(UpdateRule[int]):
    masks = True


UNCOUNTED = Loss(lambda inputs: inputs.plain(-inputs.log_probs_R), rule=_Uncounted)


@pytest.mark.parametrize("mean_over", ["responses", "budget"])
def test_a_rule_that_masks_must_count_responses_for_a_mean_over_them(mean_over: MeanOver) -> None:
    name = "tests.unit.test_mean_over:UNCOUNTED"
    assert CustomLoss(name=name).own.rule.masks
    with pytest.raises(UserError, match=rf'mean_over="{mean_over}" divides .*: define its num_trained_responses'):
        assert CustomLoss(name=name, mean_over=mean_over).own
