"""A model family: Seed-OSS, a Llama with biases on query, key and value only, as one entry of FAMILIES."""

from bapo_megatron.hf.families import FAMILIES, Family

FAMILIES["seed_oss"] = Family(
    qkv_bias="attention_bias",  # a text names the key of config.json that decides
    out_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    defaults={  # of transformers' SeedOssConfig, for keys that a config.json leaves out
        "attention_bias": True,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "eos_token_id": 2,
    },
)
