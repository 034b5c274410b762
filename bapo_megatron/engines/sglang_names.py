"""SGLang's names of weights: some are stacked, and Qwen3.5 leaves out parts of the path (srt/models, 0.5.23)."""

import re
from collections.abc import Collection

_STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_OF_EXPERT = re.compile(r"(\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_LEFT_OUT = re.compile(r"(?<=\.)(language_model|self_attn)\.")  # by Qwen3.5, in the names that it reports
_HELD = (".weight", ".bias", ".experts.w13_weight", ".experts.w2_weight", ".A_log", ".dt_bias")
_IMAGES = "visual."  # a part that the policy does not have


def held(name: str) -> str | None:
    """Return the common name of a tensor that a server reports, or None if the policy has none like it."""
    return _LEFT_OUT.sub("", name) if name.endswith(_HELD) and not name.startswith(_IMAGES) else None


def common(name: str, found: Collection[str]) -> str:
    """Return the common name of the server's tensor that takes a weight of a checkpoint.

    Args:
        found: the common names of a server's tensors. With transformers' own modules, in which it computes families
            that SGLang has no class for, nothing is stacked.
    """
    plain = _LEFT_OUT.sub("", name)
    return plain if plain in found else stacked(name)


def stacked(name: str) -> str:
    """Return the common name of the stacked tensor.

    Experts that are stacked already, as transformers has them in memory, have no name there: SGLang skips them.
    """
    if expert := _OF_EXPERT.search(name):
        name = name.replace(expert[0], f"{expert[1]}.{'w2' if expert[2] == 'down' else 'w13'}_weight")
    else:
        for whole, parts in _STACKED.items():
            for part in parts:
                name = name.replace(f".{part}.", f".{whole}.")
    return _LEFT_OUT.sub("", name)
