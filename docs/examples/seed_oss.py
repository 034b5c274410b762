"""A family of models: Seed-OSS, a Llama with biases that config.json turns on one by one."""

from __future__ import annotations

from bapo_megatron.hf.families import Family

SEED_OSS = Family(
    qkv_bias="attention_bias",
    out_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    defaults={
        "attention_bias": True,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "eos_token_id": 2,
    },
)
