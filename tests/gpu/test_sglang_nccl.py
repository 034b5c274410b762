"""Weights from a real trainer to a real SGLang server over NCCL. This takes two GPUs: NCCL refuses two ranks on one."""

import importlib.util
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime.environment import trainer_variables
from tests.distributed import HANG_S
from tests.gpu.updates import SIZES, save_model
from tests.integration.learner_reference import BOUNDS

PROMPT = (5, 9, 33, 70, 12, 8)
NUM_NEW = 24
SGLANG = ("rollout.engine=sglang", "model.dtype=bfloat16")
TOLERANCE_NATS = 0.02  # mean over tokens: both compute in bfloat16, each with its own kernels

KEY = "a-key-of-these-tests"
Exchange = tuple[str, list[float], list[float]]  # the group's backend, log-probs of the engine and of the trainer


def exchanges(folder: Path, settings: tuple[str, ...]) -> list[Exchange]:
    """Push, sample and score the sample, before and after an update, in a process of its own."""
    os.environ |= trainer_variables({})
    from bapo_megatron.buffer.packing import one_minibatch
    from bapo_megatron.config.load import load_config
    from bapo_megatron.engines.base import GenerateRequest
    from bapo_megatron.engines.connected import ConnectedEngines
    from bapo_megatron.engines.start import running_engines
    from bapo_megatron.learner.megatron import MegatronLearner
    from bapo_megatron.sync.broadcast import BroadcastChannel
    from bapo_megatron.types import Batch

    lengths = (f"data.max_prompt_tokens={len(PROMPT)}", f"rollout.max_response_tokens={NUM_NEW}")
    config = load_config([], [*settings, *lengths, "optimizer.lr=1e-2"])
    learner = MegatronLearner(resolve(config, folder))
    found: list[Exchange] = []
    with running_engines(resolve(config, folder), folder, Placement(num_servers=1, num_ranks=1).on(), KEY) as urls:
        engines = ConnectedEngines.connect(config.rollout, resolve(config).engine, urls, SIZES["vocab_size"], KEY)
        channel = BroadcastChannel(engines.pool, config.sync, engines.loop.submit)
        channel.connect(learner.weights().manifest())
        for version in (1, 2):
            assert channel.push(learner.weights().whole(), version).is_whole
            assert channel.group is not None
            (engine,) = engines.pool.live()
            request = GenerateRequest(f"ask-{version}", PROMPT, NUM_NEW, 1.0, (), seed=1)
            reply = engines.loop.run(engine.generate(request), HANG_S)
            assert {span.version for span in reply.spans} == {version}
            tokens_T = torch.tensor([*PROMPT, *reply.token_ids])
            mask_T = torch.arange(len(tokens_T)) >= len(PROMPT)
            batch = Batch(
                token_ids_T=tokens_T,
                seq_lens_S=torch.tensor([len(tokens_T)]),
                sampled_T=mask_T,
                advantages_T=1.0 * mask_T,
                behaviour_logprobs_T=torch.tensor([0.0] * len(PROMPT) + list(reply.behaviour_logprobs)),
                versions_T=torch.where(mask_T, 0, -1),
                mask_T=mask_T,
            )
            minibatch = one_minibatch(batch, max_tokens=100, share=learner.share)
            (scores_R,) = learner.log_probs(minibatch)
            found.append((channel.group.backend, list(reply.behaviour_logprobs), scores_R.tolist()))
            learner.step(minibatch, BOUNDS)
        channel.close()
        engines.close()
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a trainer's and a server's")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
def test_a_server_samples_from_the_weights_that_came_over_nccl(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        before, after = pool.submit(exchanges, folder, SGLANG).result(timeout=HANG_S)
    for backend, engine, trainer in (before, after):
        assert backend == "nccl"
        assert (torch.tensor(engine) - torch.tensor(trainer)).abs().mean() < TOLERANCE_NATS
    moved = torch.tensor(after[2]).mean() - torch.tensor(before[2]).mean()
    assert moved > 10 * TOLERANCE_NATS, "the update should be seen, or the second push shows nothing"
