"""Qwen3.5: linear attention in all layers but every n-th, whose full attention has a gate."""

import json
from collections.abc import Iterator
from dataclasses import replace

from bapo_megatron.hf.families.parts import (
    ACTIVATIONS,
    ATTENTION,
    COLUMNS,
    COPY,
    GATED_MLP,
    LAYER,
    ROWS,
    Block,
    Family,
    Parameter,
)
from bapo_megatron.hf.families.settings import Settings, full_interval, linear_layers
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
_LAYER_TYPES = ("linear_attention", "full_attention")


def unsupported(get: Settings) -> Iterator[str]:
    """Yield what is not built for linear attention, or contradicts itself."""
    keys, values = get("linear_num_key_heads"), get("linear_num_value_heads")
    if values % keys:
        yield f"linear_num_value_heads={values} cannot share linear_num_key_heads={keys}"
    # transformers reads neither of these, but servers obey them
    if (has_gate := get("attn_output_gate")) is not True:
        yield (
            f"attn_output_gate={json.dumps(has_gate)} is not supported: full attention needs its gate, as with "
            "attn_output_gate=true"
        )
    if (gate := get("output_gate_type")) not in (None, "silu", "swish"):
        yield f'output_gate_type={gate!r} is not supported: the gate of linear attention is "swish"'
    if (state := get("mamba_ssm_dtype")) not in (None, "float32"):
        yield f'mamba_ssm_dtype={state!r} is not supported: the state of linear attention is "float32"'
    if (active := get("hidden_act")) in ACTIVATIONS and active != "silu":
        yield f'hidden_act={active!r} is not supported with linear attention, whose convolution has "silu"'
    kinds, step = get("layer_types"), get("full_attention_interval")
    is_null = kinds is None and step is None and "full_attention_interval" in get.written
    if is_null or (step is not None and (type(step) is not int or step < 1)):
        yield f"full_attention_interval={json.dumps(step)} is not a positive number"
    elif kinds is not None:
        if others := [kind for kind in kinds if kind not in _LAYER_TYPES]:
            yield f"layer_types has {others[0]!r}, which is not supported; choose from {', '.join(_LAYER_TYPES)}"
        elif len(kinds) == get("num_hidden_layers") and kinds != [
            _LAYER_TYPES[not is_linear] for is_linear in linear_layers(get)
        ]:
            every = f"full_attention_interval={full_interval(get)}"
            yield f"layer_types do not have full attention in every n-th layer alone, as {every} would give it"


LINEAR_LAYER = Block(
    (*_LINEAR_ATTENTION, *GATED_MLP),
    trainer="bapo_megatron.learner.layers:linear_attention",
    engine="bapo_megatron.engines.embedded.layers:pre_norm_linear",
    refuses=unsupported,
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
