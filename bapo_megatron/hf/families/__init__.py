"""The supported families of decoders, a file each; `parts.py` has what they are made of. To add one: docs/models.md.

A file says how its family differs from plain Llama. The learner, the embedded engine, checkpoints and memory estimates
read the resulting `hf.shape.ModelShape` and its tables of parameters; none of them knows a family by name.
`model.family` can name a user's own.
"""

from bapo_megatron.hf.families import (
    gemma,
    granite,
    llama,
    mistral,
    olmo2,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    smollm3,
)
from bapo_megatron.hf.families.parts import (
    ACTIVATIONS,
    ATTENTION,
    COLUMNS,
    COMMON_DEFAULTS,
    COPY,
    EMBEDDING,
    FINAL_NORM,
    LAYER,
    OUTPUT,
    OUTSIDE,
    QKV,
    ROPE_TYPES,
    ROWS,
    VALUE_HEAD,
    VOCAB,
    Block,
    Family,
    Parameter,
)
from bapo_megatron.hf.families.qwen3_5_moe import SHARED_GATE
from bapo_megatron.hf.families.qwen3_moe import MIXTURE_LAYER

__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "COLUMNS",
    "COMMON_DEFAULTS",
    "COPY",
    "EMBEDDING",
    "FAMILIES",
    "FINAL_NORM",
    "LACKING",
    "LAYER",
    "MIXTURE_LAYER",
    "OUTPUT",
    "OUTSIDE",
    "QKV",
    "ROPE_TYPES",
    "ROWS",
    "SHARED_GATE",
    "VALUE_HEAD",
    "VOCAB",
    "Block",
    "Family",
    "Parameter",
]

_PLAIN = (gemma, granite, llama, mistral, olmo2, qwen2, qwen3, qwen3_moe, smollm3)
_HYBRID = (qwen3_5, qwen3_5_moe)
FAMILIES = {
    family.model_type: family
    for family in (*(file.FAMILY for file in _PLAIN), *(f for file in _HYBRID for f in (file.TEXT, file.WITH_VISION)))
}
"""The families by the model_type of config.json."""

_NORMS = "norms before and after attention and MLP"
LACKING = {
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "gemma2": f"sliding windows, soft caps of attention and logits, and {_NORMS}",
    "gemma3": f"sliding windows, a rotation for each type of layer, and {_NORMS}",
    "gemma3_text": f"sliding windows, a rotation for each type of layer, and {_NORMS}",
    "glm": "rotation of interleaved pairs",
    "glm4": f"rotation of interleaved pairs, and {_NORMS}",
    "gpt_oss": "attention sinks and sliding windows",
    "olmo3": "sliding windows, and a rotation for each type of layer",
    "qwen3_next": "projections of linear attention that are interleaved by key head",
}
"""The missing parts of well-known families, by model_type; named when a model is refused."""
