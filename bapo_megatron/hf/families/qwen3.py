"""Qwen3: a Llama that norms each head's queries and keys."""

from bapo_megatron.hf.families.parts import Family

FAMILY = Family(
    "qwen3",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    window_switch="use_sliding_window",
    not_null=("head_dim",),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
    },
)
