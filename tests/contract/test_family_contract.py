"""What every rollout engine must do with the families whose layers differ from Llama's: pushes, pieces and scores."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, Olmo2Config, PreTrainedConfig, PreTrainedModel, SmolLM3Config

from tests.hf_models import save_randomised
from tests.rollout_servers import EOS, LAUNCHERS, VOCAB_SIZE, Servers, sglang_servers, started

PROMPTS = ([5, 9, 33, 70, 12, 8], [40, 3], [7, 22, 61, 18, 90, 44, 2, 31, 56])
TOLERANCE = 1e-5
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "granite": GraniteConfig(**SIZES, **MULTIPLIERS),
    "olmo2": Olmo2Config(**SIZES),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0]),
}
ONE_SERVER = {"embedded": LAUNCHERS["embedded"], "sglang": sglang_servers(num_servers=1, tensor_parallel=1)}
QUICK = ("olmo2", "embedded")
CASES = [
    pytest.param(case, id="-".join(case), marks=[] if case == QUICK else [pytest.mark.slow])
    for case in product(FAMILIES, ONE_SERVER)
]


@pytest.fixture(params=CASES)
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    family, kind = request.param

    def make_model(folder: Path, seed: int, max_context: int) -> PreTrainedModel:
        config = type(FAMILIES[family])(**FAMILIES[family].to_dict() | {"max_position_embeddings": max_context})
        model = save_randomised(config, folder, seed)
        model.set_attn_implementation("eager")
        return model

    with started(kind, ONE_SERVER[kind], make_model, tmp_path) as running:
        yield running


def test_pieces_over_pushes_and_scores_have_transformers_log_probs(servers: Servers) -> None:
    samples, model_of = servers.pieces_over_pushes(PROMPTS, "aba", turn_tokens=12)
    assert len(samples) == 6
    servers.check_pieces(samples, model_of, atol=TOLERANCE, rtol=TOLERANCE)
    for (trajectory,) in (sample.trajectories for sample in samples):
        ids = trajectory.token_ids.tolist()
        scores = torch.tensor(servers.loop.run(servers.engine.score(ids, 1, 0)).logprobs_N)
        torch.testing.assert_close(scores, servers.logprobs_of("a", ids), atol=TOLERANCE, rtol=TOLERANCE)
