"""SmolLM3: a Llama that does not rotate queries and keys of every fourth layer, or of the layers that it names."""

from bapo_megatron.hf.families.parts import Family

FAMILY = Family(
    "smollm3",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    skips_rotation=True,
    window_switch="use_sliding_window",
    not_null=("head_dim",),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
        "no_rope_layer_interval": 4,
    },
)
