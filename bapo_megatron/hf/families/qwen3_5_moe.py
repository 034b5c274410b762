"""Qwen3.5-MoE: Qwen3.5 whose MLPs are mixtures of experts, with a shared expert that a gate scales for each token.

Published folders hold one tensor for the experts of a layer (`stacked`), and transformers also saves one for each: both
are read, the first is written. Source: load_fused_expert_weights in srt/models/qwen3_5.py of SGLang 0.5.23.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

from bapo_megatron.hf.families import qwen3_moe
from bapo_megatron.hf.families.parts import COLUMNS, COPY, GATED_MLP, ROWS, Block, Parameter
from bapo_megatron.hf.families.qwen3_5 import GATED_LAYER, LINEAR_LAYER
from bapo_megatron.hf.families.qwen3_5 import TEXT as DENSE
from bapo_megatron.hf.families.qwen3_moe import EXPERTS
from bapo_megatron.hf.families.settings import Settings
from bapo_megatron.hf.streams import ModelStream, chosen_experts, routes

SHARED_GATE = "mlp.shared_experts.gate_weight"  # Megatron's name
_ROUTER, _GATE_AND_UP, _DOWN = EXPERTS
MIXTURE = (
    _ROUTER,
    replace(_GATE_AND_UP, stacked="mlp.experts.gate_up_proj"),
    replace(_DOWN, stacked="mlp.experts.down_proj"),
    Parameter(
        "mlp.shared_experts.linear_fc1.weight",
        ROWS,
        {"mlp.shared_expert.gate_proj.weight": "SE", "mlp.shared_expert.up_proj.weight": "SE"},
    ),
    Parameter("mlp.shared_experts.linear_fc2.weight", COLUMNS, {"mlp.shared_expert.down_proj.weight": "ES"}),
    Parameter(SHARED_GATE, COPY, {"mlp.shared_expert_gate.weight": "1E"}),
)


def _with_mixture(layer: Block) -> Block:
    return replace(layer, parameters=(*layer.parameters[: -len(GATED_MLP)], *MIXTURE))


def unsupported(get: Settings) -> Iterator[str]:
    """Yield what is not built for these experts, or contradicts itself."""
    yield from qwen3_moe.unsupported(get)
    if get("norm_topk_prob") is not True:  # transformers does not read it, but servers obey it
        value = json.dumps(get("norm_topk_prob"))
        yield (
            f"norm_topk_prob={value} is not supported: the shares of the chosen experts need a sum of 1, as with "
            "norm_topk_prob=true"
        )


TEXT = replace(
    DENSE,
    model_type="qwen3_5_moe_text",
    has_experts=True,
    has_shared_expert=True,
    refused=(*DENSE.refused, "num_local_experts"),  # transformers does not read it
    defaults=DENSE.defaults
    | {
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,  # as servers have it
    },
    layer=replace(_with_mixture(GATED_LAYER), refuses=unsupported),
    linear_layer=_with_mixture(LINEAR_LAYER),
    streams=(ModelStream(routes, chosen_experts),),
)
WITH_VISION = replace(TEXT, model_type="qwen3_5_moe", prefix="model.language_model.")  # the tower stays unread
