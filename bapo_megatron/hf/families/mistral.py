"""Mistral: a Llama whose sliding windows are refused."""

from bapo_megatron.hf.families.parts import Family

FAMILY = Family(
    "mistral",
    window_switch="sliding_window",
    absent=("layer_types",),  # with them, transformers reads another family, ministral
    not_null=("num_key_value_heads",),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
)
