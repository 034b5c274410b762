"""Other layouts of the same trainer GPUs, ranked by the time of a step among those that fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bapo_megatron.config.plan import num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape, model_shape
from bapo_megatron.preflight.check import accepts_layout
from bapo_megatron.preflight.plan import Plan, make_plan

_WORTH = 0.97  # of the present time: what is not this much better is no suggestion


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Overrides, and what they lead to."""

    overrides: tuple[str, ...]
    plan: Plan


def suggest(config: Config, hf_config: dict[str, Any], present: Plan, count: int = 3) -> list[Suggestion]:
    """The fastest layouts that `bapo check` accepts, better than the present one where that fits too; with the fewest
    changes first. Args: hf_config: the model's config.json."""
    shape, found = model_shape(hf_config), []
    for sections in _candidates(config, shape):
        candidate = _with(config, sections)
        overrides = _overrides(config, sections)
        if overrides:
            plan = make_plan(candidate, shape, present.tokens.response)
            limit = _WORTH * present.train.expected if present.fits else float("inf")
            if plan.fits and plan.train.expected < limit and accepts_layout(candidate, hf_config, on_gpus=True):
                found.append(Suggestion(overrides, plan))
    return sorted(found, key=lambda s: (round(s.plan.train.expected, 1), len(s.overrides), s.plan.trainer.total))[
        :count
    ]


def _candidates(config: Config, shape: ModelShape) -> Iterator[dict[str, dict[str, Any]]]:
    ranks, c = num_ranks(config), config.cluster
    split = (shape.num_heads, shape.num_kv_heads, shape.ffn_size)
    tensors = [t for t in range(1, c.gpus_per_node + 1) if not any(n % t for n in split)]
    pipelines = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
    contexts = [2**n for n in range(5)]
    r, t = config.rollout, config.train
    per_update = r.prompts_per_step * r.samples_per_prompt // t.minibatches_per_step
    for tensor, pipeline, context, recompute in itertools.product(tensors, pipelines, contexts, (False, True)):
        data, rest = divmod(ranks, tensor * pipeline * context)
        if rest or data == 0 or data > per_update or c.gpus_per_node % tensor:
            continue
        layout = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data, "sequence": tensor > 1}
        if config.parallel.virtual_pipeline > 1 and pipeline != config.parallel.pipeline:
            layout["virtual_pipeline"] = 1
        yield {
            "parallel": layout,
            "train": {"recompute": recompute},
            "optimizer": {"distributed": data * context > 1},
        }


def _with(config: Config, sections: dict[str, dict[str, Any]]) -> Config:
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def _overrides(config: Config, sections: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    return tuple(
        f"{section}.{key}={str(value).lower()}"
        for section, values in sections.items()
        for key, value in values.items()
        if getattr(getattr(config, section), key) != value
    )
