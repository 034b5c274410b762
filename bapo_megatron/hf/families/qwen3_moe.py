"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts."""

from bapo_megatron.hf.families.parts import ATTENTION, COLUMNS, COPY, ROWS, Block, Family, Parameter
from bapo_megatron.hf.splits import EachExpert
from bapo_megatron.hf.streams import ModelStream, chosen_experts, routes

EXPERTS = (
    Parameter("mlp.router.weight", COPY, {"mlp.gate.weight": "XE"}),
    Parameter(
        "mlp.experts.local_experts.{}.linear_fc1.weight",
        EachExpert(ROWS),
        {"mlp.experts.{}.gate_proj.weight": "ME", "mlp.experts.{}.up_proj.weight": "ME"},
    ),
    Parameter(
        "mlp.experts.local_experts.{}.linear_fc2.weight", EachExpert(COLUMNS), {"mlp.experts.{}.down_proj.weight": "EM"}
    ),
)
MIXTURE_LAYER = Block((*ATTENTION, *EXPERTS))

FAMILY = Family(
    "qwen3_moe",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    has_experts=True,
    refused=("use_sliding_window",),
    not_null=("num_key_value_heads", "head_dim"),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    layer=MIXTURE_LAYER,
    streams=(ModelStream(routes, chosen_experts),),
)
