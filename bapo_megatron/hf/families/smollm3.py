"""SmolLM3: a Llama that does not rotate queries and keys of every fourth layer, or of the layers that it names."""

import json

from bapo_megatron.errors import plural
from bapo_megatron.hf.families.parts import Family
from bapo_megatron.hf.families.settings import Settings


def rotates(get: Settings) -> list[bool]:
    """Return for each layer whether its queries and keys are rotated: as no_rope_layers says, in which 1 means yes.

    Raises:
        ValueError: config.json does not say it.
    """
    named, interval, count = get("no_rope_layers"), get("no_rope_layer_interval"), get("num_hidden_layers")
    if named is None:
        if type(interval) is not int or interval < 1:
            raise ValueError(f"no_rope_layer_interval={json.dumps(interval)} is not a positive number")
        return [(number + 1) % interval != 0 for number in range(count)]
    if not isinstance(named, list) or any(value not in (0, 1) for value in named):
        raise ValueError(f"no_rope_layers={json.dumps(named)} is not a list of 0 and 1")
    if len(named) != count:
        raise ValueError(f"no_rope_layers has {plural(len(named), 'value')}, but num_hidden_layers={count}")
    return list(map(bool, named))


FAMILY = Family(
    "smollm3",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    rotates=rotates,
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
