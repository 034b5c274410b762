"""Qwen2 and 2.5: a Llama with biases on queries, keys and values."""

from bapo_megatron.hf.families.parts import Family

FAMILY = Family(
    "qwen2",
    qkv_bias=True,
    window_switch="use_sliding_window",
    not_null=("head_dim",),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "max_window_layers": 28},
)
