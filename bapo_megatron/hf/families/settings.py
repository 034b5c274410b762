"""The values of a config.json, as a family's files read them."""

import sys
from typing import Any

from bapo_megatron.hf.families.parts import COMMON_DEFAULTS, Family

_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # the hub's files have the first, transformers 5 writes the other
_FULL_INTERVAL = 4  # transformers' default of full_attention_interval, which a config class does not hold
_OF_THE_WHOLE = ("model_type", "tie_word_embeddings")  # keys that describe text and images together
_READ_OUTSIDE = (*_OF_THE_WHOLE, "text_config", "quantization_config", "eos_token_id")  # by files with a text_config
LOST = "outside text_config"  # no key of a file
_POSITIONS = (
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)


class Settings:
    """Values of a config.json, with the family's defaults for the keys that it leaves out.

    Example: Settings({"model_type": "llama", "vocab_size": 8}, family)("hidden_act") == "silu"
    """

    def __init__(self, hf_config: dict[str, Any], family: Family) -> None:
        self.family = family
        written, text = with_text_settings(hf_config), hf_config.get("text_config")
        if family.prefix != "model." and isinstance(text, dict):
            written = text | {key: written[key] for key in (*_READ_OUTSIDE, LOST) if key in written}
        self.written = written
        self._values = COMMON_DEFAULTS | family.defaults | written
        for key, meant in family.legacy.items():
            self._values[key] = meant.get(str(self(key)), self(key))
        self.expert_counts = {key: written[key] for key in _EXPERT_COUNTS if key in written}
        if self.expert_counts:
            self._values["num_experts"] = next(iter(self.expert_counts.values()))

    def __call__(self, key: str) -> Any:
        return self._values.get(key)


def with_text_settings(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the settings of its text_config, if it has one, at the top too.

    They hold whatever the top says of them, as in transformers; only `_OF_THE_WHOLE` are the top's. `LOST` lists keys
    about positions that stand at the top, too.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, dict) or LOST in hf_config:
        return hf_config
    lost = [
        key for key in _POSITIONS if hf_config.get(key) and (key == "rope_scaling" or hf_config[key] != text.get(key))
    ]
    return hf_config | text | {key: hf_config[key] for key in _OF_THE_WHOLE if key in hf_config} | {LOST: lost}


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def linear_layers(get: Settings) -> list[bool]:
    """Return for each layer whether its attention is linear: all but every n-th have it."""
    step = full_interval(get) if get.family.linear_layer else 1
    return [(number + 1) % step != 0 for number in range(get("num_hidden_layers"))]


def full_interval(get: Settings) -> int:
    """Return n if every n-th layer has full attention: as config.json says, or as its layer_types show."""
    if (step := get("full_attention_interval")) is None:
        kinds = get("layer_types")
        step = _FULL_INTERVAL if kinds is None else [*kinds, "full_attention"].index("full_attention") + 1
    return int(step)
