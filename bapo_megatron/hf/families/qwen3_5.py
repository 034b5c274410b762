"""Qwen3.5: linear attention in all layers but every n-th, whose full attention has a gate."""

from dataclasses import replace

from bapo_megatron.hf.families.parts import ATTENTION, COLUMNS, COPY, GATED_MLP, LAYER, ROWS, Block, Family, Parameter
from bapo_megatron.hf.splits import EvenRows, GatedInterleaved

_GATED_QKV = Parameter(
    "self_attention.linear_qkv.weight",
    GatedInterleaved("G"),
    {"self_attn.q_proj.weight": "PE", "self_attn.k_proj.weight": "KE", "self_attn.v_proj.weight": "KE"},
)
GATED_LAYER = Block(tuple(_GATED_QKV if p.name == _GATED_QKV.name else p for p in LAYER.parameters))
_INPUT_NORM, *_, _MLP_NORM = ATTENTION
_LINEAR_ATTENTION = (
    _INPUT_NORM,
    Parameter(
        "self_attention.in_proj.weight",
        EvenRows(("kkv", "v", "n", "n")),
        {
            "linear_attn.in_proj_qkv.weight": "CE",
            "linear_attn.in_proj_z.weight": "vE",
            "linear_attn.in_proj_b.weight": "nE",
            "linear_attn.in_proj_a.weight": "nE",
        },
    ),
    Parameter("self_attention.conv1d.weight", EvenRows(("kkv",)), {"linear_attn.conv1d.weight": "C1W"}),
    Parameter("self_attention.A_log", ROWS, {"linear_attn.A_log": "n"}),
    Parameter("self_attention.dt_bias", ROWS, {"linear_attn.dt_bias": "n"}),
    Parameter("self_attention.out_norm.weight", COPY, {"linear_attn.norm.weight": "d"}),
    Parameter("self_attention.out_proj.weight", COLUMNS, {"linear_attn.out_proj.weight": "Ev"}),
    _MLP_NORM,
)
LINEAR_LAYER = Block(
    (*_LINEAR_ATTENTION, *GATED_MLP),
    trainer="bapo_megatron.learner.layers:linear_attention",
    engine="bapo_megatron.engines.embedded.layers:pre_norm_linear",
)

TEXT = Family(
    "qwen3_5_text",
    qk_norm=True,
    norm_plus_one=True,
    output_gate=True,
    refused=("attention_bias",),
    not_null=("num_key_value_heads", "head_dim"),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,  # as servers have it; transformers does not read it
    },
    layer=GATED_LAYER,
    linear_layer=LINEAR_LAYER,
    unread=("mtp.", "model.visual."),
)
WITH_VISION = replace(TEXT, model_type="qwen3_5", prefix="model.language_model.")  # the tower stays unread
