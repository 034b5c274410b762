"""Leave words that repeat the response's own out of the loss: an annotator marks their tokens."""

from collections.abc import Mapping

import torch

from bapo_megatron.algorithms.losses import LossInputs, TokenLoss
from bapo_megatron.config.schema import Config
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Sample

REPEATED = TokenStream("repeated", "uint8", missing=0)
NUM_TOKENS = 4  # tokens in a row that make a repetition


class Repeats:
    """The annotator."""

    streams = (REPEATED,)
    deadline_s = 10.0

    async def rows(self, sample: Sample) -> Mapping[TokenStream, list[int]]:
        """Return 1 for each token that ends NUM_TOKENS tokens which the sample has had before."""
        token_ids = sample.sampled_ids.tolist()
        rows, before = [], set()
        for end in range(1, len(token_ids) + 1):
            last = tuple(token_ids[max(end - NUM_TOKENS, 0) : end])
            rows.append(int(last in before))
            before |= {last} if len(last) == NUM_TOKENS else set()
        return {REPEATED: rows}


def make(config: Config) -> Repeats:
    """Return the annotator of a run."""
    return Repeats()


def loss(inputs: LossInputs) -> TokenLoss:
    """Compute the policy gradient without repeated tokens."""
    batch = inputs.batch
    is_new_R = batch.mask_R & (batch.named("repeated") == 0)
    return inputs.plain(torch.where(is_new_R, -batch.advantages_R * inputs.log_probs_R, 0.0))
