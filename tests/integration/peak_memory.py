"""What torch allocates in a real update: one process per rank, every allocation recorded."""

import gc
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.types import Batch
from benchmarks.side_by_side import peak_allocated
from tests.distributed import HANG_S
from tests.integration.learner_reference import BOUNDS

SIZES: dict[str, Any] = {
    "vocab_size": 2001,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT_TOKENS, RESPONSE_TOKENS, NUM_SEQUENCES = 12, 500, 4


@dataclass(frozen=True)
class Case:
    """One measurement."""

    title: str
    family: str = "qwen3"
    parallel: dict[str, Any] = field(default_factory=dict)
    recompute: bool | dict[str, Any] = False  # or [train] recompute_layers, recompute_modules
    distributed: bool = False

    def config(self) -> Config:
        return Config.model_validate(
            {
                "data": {"max_prompt_tokens": PROMPT_TOKENS},
                "parallel": {"timeout_s": HANG_S, **self.parallel},
                "rollout": {
                    "engine": "recorded",
                    "prompts_per_step": 1,
                    "samples_per_prompt": NUM_SEQUENCES,
                    "max_response_tokens": RESPONSE_TOKENS,
                },
                "optimizer": {"distributed": self.distributed},
                "train": {
                    "logprob_chunk_tokens": 256,
                    "recompute": bool(self.recompute),
                    **(self.recompute if isinstance(self.recompute, dict) else {}),
                    "max_tokens_per_microbatch": 2 * (PROMPT_TOKENS + RESPONSE_TOKENS),
                },
            }
        )


def longest_batch() -> Batch:
    """Every prompt and response is as long as allowed."""
    generator = torch.Generator().manual_seed(3)
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    is_response_T = (torch.arange(length) >= PROMPT_TOKENS).repeat(NUM_SEQUENCES)
    num_tokens = length * NUM_SEQUENCES
    return Batch(
        token_ids_T=torch.randint(0, SIZES["vocab_size"], (num_tokens,), generator=generator),
        seq_lens_S=torch.full((NUM_SEQUENCES,), length),
        prompt_lens_S=torch.full((NUM_SEQUENCES,), PROMPT_TOKENS),
        advantages_T=torch.randn(num_tokens, generator=generator) * is_response_T,
        behaviour_logprobs_T=(-8.0 + torch.randn(num_tokens, generator=generator)) * is_response_T,
        versions_T=torch.where(is_response_T, 0, -1),
        mask_T=is_response_T,
    )


def measure(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    """Writes {title: peak in bytes} of this rank."""
    from megatron.core import parallel_state

    peaks = {}
    for case in cases:
        peaks[case.title] = _peak_of_update(case.config(), root / case.family)
        parallel_state.destroy_model_parallel()
    (root / f"peaks-{world_size}-{rank}.json").write_text(json.dumps(peaks))


def _peak_of_update(config: Config, model: Path) -> int:
    """Largest sum of what torch has allocated, from before the model exists to the end of the second update."""
    batch = longest_batch()

    def update() -> None:
        learner = MegatronLearner(config, model)
        minibatch = one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=learner.share)
        for _ in range(2):
            gc.collect()  # what the update before has left in cycles is freed here, and not at some moment of the next
            learner.step(minibatch, BOUNDS)

    return peak_allocated(update)
