"""Packed sequences against padded ones in the same learner, and balancing data ranks by FLOPs.

    python -m benchmarks.packing [--quick]

Padding: a BAPO update of the demo model with packed sequences, against the same update with each sequence padded to the
longest one in the batch by tokens that the loss ignores. Both must have the same loss. Times are CPU seconds.

Balance: the FLOPs of the costliest of eight data ranks, for which all others wait. Sequences are dealt in turn, or to
the rank with the fewest tokens, against the plan in buffer/packing.py. Computed, not timed.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import pad

from bapo_megatron.assets import demo_model_path
from bapo_megatron.buffer.packing import Share, balanced_shares, longest_first, single_units
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from benchmarks.side_by_side import Rows, Turns, main, same, take_turns
from benchmarks.train_step import Case, make_config, update_of

PADDED = "each padded to the longest"
IN_TURN, BY_TOKENS = "dealt in turn", "to the rank with the fewest tokens"
NUM_RANKS = 8
MODEL = "Qwen2.5-Math-7B-64k"
MAX_TOKENS = 65_536


def padded(batch: Batch) -> Batch:
    """Pad every sequence to the longest one, with tokens outside the mask."""
    longest = int(batch.seq_lens_S.max())
    lens = batch.seq_lens_S.tolist()

    def fill(values_T: Tensor, value: float) -> Tensor:
        return torch.cat([pad(x, (0, longest - len(x)), value=value) for x in values_T.split(lens)])

    return replace(
        batch,
        token_ids_T=fill(batch.token_ids_T, 1),
        seq_lens_S=torch.full_like(batch.seq_lens_S, longest),
        advantages_T=fill(batch.advantages_T, 0),
        behaviour_logprobs_T=fill(batch.behaviour_logprobs_T, 0),
        versions_T=fill(batch.versions_T, 0),
        mask_T=fill(batch.mask_T, False),
    )


def padding_turns(case: Case, num_turns: int) -> Turns:
    config = make_config("bapo", case, lr=1e-12)  # both ways update one learner, and must not change its weights
    learner = MegatronLearner(resolve(config, demo_model_path()))
    batch = case.batch(learner.shape.vocab_size)
    ways = {"packed": update_of(learner, batch), PADDED: update_of(learner, padded(batch))}
    turns = take_turns(ways, num_turns, agree=same(1e-4))
    parallel_state.destroy_model_parallel()
    return turns


def balanced(model: str, num_draws: int) -> Turns:
    """Compute the costliest rank's FLOPs for batches of 256 long-tailed responses."""
    share = Share(data_size=NUM_RANKS, pair_cost=model_shape(KNOWN_MODELS[model]).pair_cost)

    def by_cost(lens: list[int]) -> list[list[int]]:
        return [list(chain(*bins)) for bins in balanced_shares(single_units(lens, share), share, MAX_TOKENS)]

    plans: dict[str, Callable[[list[int]], list[list[int]]]] = {
        "balanced by FLOPs": by_cost,
        IN_TURN: lambda lens: [list(range(len(lens)))[rank::NUM_RANKS] for rank in range(NUM_RANKS)],
        BY_TOKENS: lambda lens: longest_first(lens, NUM_RANKS),
    }
    amounts: dict[str, list[float]] = {name: [] for name in plans}
    for seed in range(num_draws):
        generator = torch.Generator().manual_seed(seed)
        lengths_S = (torch.randn(256, generator=generator) * 1.2).exp() * 3000
        lengths = lengths_S.clamp(16, 65_536).int().tolist()
        for name, plan in plans.items():
            ranks = plan(lengths)
            assert sorted(chain(*ranks)) == list(range(len(lengths)))
            amounts[name].append(max(sum(share.cost(lengths[i]) for i in mine) for mine in ranks))
    return Turns(amounts, os.getloadavg()[0], os.getloadavg()[0])


def rows(quick: bool) -> Rows:
    """Compare the time with padding, then the balance."""
    for responses in ((8, 48), (2, 116)):
        case = Case(f"responses of {responses[0]} to {responses[1]} tokens", "demo", 64, 12, responses, 8192)
        turns = padding_turns(case, 5 if quick else 15)
        yield turns.row(f"BAPO update, demo model, {case.title}", PADDED)
    turns = balanced(MODEL, 20)
    for other in (IN_TURN, BY_TOKENS):
        yield turns.row(f"FLOPs of the costliest of {NUM_RANKS} ranks, {MODEL}", other, unit="tokens' worth")


if __name__ == "__main__":
    main(__doc__, rows)
