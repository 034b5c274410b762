"""An update whose micro-batch holds a group's prompt once, against one with a copy for each response.

    python -m benchmarks.shared_prompts [--quick]

The responses of a group have equal lengths, at several ratios of prompt to response. Both ways make the same BAPO
update (scores, search for bounds, loss, Adam) of the same sequences in one micro-batch, in one process, in float32, and
must have equal losses. Times are CPU seconds.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state

from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from benchmarks.side_by_side import Rows, main, same, take_turns
from benchmarks.train_step import Case, Update, make_config, pack, save_larger_model

ONCE, COPIES = "each prompt once", "a copy for each response"
STILL = 1e-12  # a learning rate that moves no weight, so that all updates begin with the same ones
# prompt tokens, response tokens, responses
CASES = ((64, 512, 8), (384, 384, 4), (384, 384, 8), (384, 384, 16), (768, 96, 8))


def batch_of(prompt: int, response: int, num_responses: int, vocab_size: int) -> Batch:
    """Return the responses to one prompt."""
    batch = Case("", "", num_responses, prompt, (response, response), 0).batch(vocab_size)
    token_ids_ST = batch.token_ids_T.reshape(num_responses, -1)
    token_ids_ST[:, :prompt] = token_ids_ST[0, :prompt].clone()
    prompt_S = torch.zeros(num_responses, dtype=torch.int64)
    return replace(batch, prompt_S=prompt_S, shared_lens_S=prompt_S + prompt)


def rows(quick: bool) -> Rows:
    """Compare the two ways in each case."""
    with tempfile.TemporaryDirectory(prefix="shared-prompts-") as folder:
        save_larger_model(Path(folder))
        for prompt, response, num_responses in CASES[2:3] if quick else CASES:
            case = Case("", "", num_responses, prompt, (response, response), num_responses * (prompt + response))
            learner = MegatronLearner(resolve(make_config("bapo", case, lr=STILL), Path(folder)))
            batch = batch_of(prompt, response, num_responses, learner.shape.vocab_size)
            ways = {name: update_of(learner, batch, shares=name == ONCE) for name in (ONCE, COPIES)}
            turns = take_turns(ways, 3 if quick else 9, agree=same(1e-4))
            parallel_state.destroy_model_parallel()
            share = (prompt + num_responses * response) / (num_responses * (prompt + response))
            title = f"{num_responses} responses of {response} tokens to a prompt of {prompt}, {share:.2f} of the tokens"
            yield turns.row(title, COPIES)


def update_of(learner: MegatronLearner, batch: Batch, *, shares: bool) -> Update:
    """Return an update in one way."""
    share, finder = replace(learner.share, shares_prompts=shares), BoundsFinder(learner.config, learner)

    def update() -> float:
        minibatch = pack(batch, learner.config, share)
        assert (minibatch.counts.saved > 0) == shares
        return learner.step(minibatch, finder.find(minibatch)).metrics["loss/policy"]

    return update


if __name__ == "__main__":
    main(__doc__, rows)
