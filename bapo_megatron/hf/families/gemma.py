"""Gemma, the first generation: Gemma 2 and 3 have another model_type, and layers of other kinds."""

from bapo_megatron.hf.families.parts import Family

FAMILY = Family(
    "gemma",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norm_plus_one=True,
    scaled_embedding=True,
    refused=("use_bidirectional_attention",),
    not_null=("num_key_value_heads", "head_dim"),
    legacy={"hidden_act": {"gelu": "gelu_pytorch_tanh"}},  # the official releases say one and mean the other
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)
