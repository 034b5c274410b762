"""Llama: the family that the others are compared with."""

from bapo_megatron.hf.families.parts import Family

FAMILY = Family(
    "llama",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
)
