"""A model family: Seed-OSS, a Llama whose config.json turns biases on for query, key and value, or for the output."""

from bapo_megatron.hf.families import Family

FAMILY = Family(
    "seed_oss",  # the model_type of its checkpoints
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
