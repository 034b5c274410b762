"""Whether a layout can hold a model. Imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Any

from bapo_megatron.hf.shape import model_shape, unsupported


def validate_layout(hf_config: dict[str, Any], tensor: int, pipeline: int, virtual_pipeline: int = 1) -> list[str]:
    """Why this model cannot be split this way; each message names the numbers and a working alternative.

    Args:
        hf_config: a config.json, see `hf.shape.load_hf_config`.
        tensor: tensor-parallel size (parallel.tensor).
        pipeline: pipeline-parallel size (parallel.pipeline).
        virtual_pipeline: chunks of each stage (parallel.virtual_pipeline).
    """
    problems = unsupported(hf_config)
    if problems:
        return problems
    shape = model_shape(hf_config)
    split = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_kv_heads,
        "feed-forward rows": shape.ffn_size,
    }
    if bad := [f"{count} {what}" for what, count in split.items() if count % tensor]:
        works = [n for n in range(1, shape.num_heads + 1) if all(count % n == 0 for count in split.values())]
        problems.append(
            f"parallel.tensor={tensor} does not divide {', '.join(bad)}; parallel.tensor can be {_choices(works)}"
        )
    if shape.num_layers % pipeline:
        works = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
        problems.append(
            f"parallel.pipeline={pipeline} does not divide {shape.num_layers} layers; "
            f"parallel.pipeline can be {_choices(works)}"
        )
    elif shape.num_layers // pipeline % virtual_pipeline:
        per_stage = shape.num_layers // pipeline
        works = [n for n in range(1, per_stage + 1) if per_stage % n == 0]
        problems.append(
            f"parallel.virtual_pipeline={virtual_pipeline} does not divide the {per_stage} layers of a stage; "
            f"it can be {_choices(works)}"
        )
    return problems


def _choices(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + " or " + str(values[-1]) if len(values) > 1 else str(values[0])
