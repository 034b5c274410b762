"""Other settings for the same trainer ranks: faster layouts, and changes that need less memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bapo_megatron.config.plan import num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape, model_shape
from bapo_megatron.preflight.check import accepts_layout
from bapo_megatron.preflight.memory import fullest_rank, microbatch_tokens, runs_forwards_first
from bapo_megatron.preflight.plan import Plan, make_plan

_WORTH = 0.97  # suggest only changes to less than this share of the present time or memory
_MIN_CHUNK_TOKENS = 64

Change = dict[str, dict[str, Any]]  # values by section and setting


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Overrides and the plan they lead to."""

    overrides: tuple[str, ...]
    plan: Plan


def suggest(config: Config, hf_config: dict[str, Any], present: Plan, count: int = 3) -> list[Suggestion]:
    """Find the fastest layouts that `bapo check` accepts; ties go to the fewest changes.

    Args:
        hf_config: the model's config.json.
        present: the plan to improve on; if it does not fit, any fitting layout counts.
    """
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


def _candidates(config: Config, shape: ModelShape) -> Iterator[Change]:
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


def _with(config: Config, sections: Change) -> Config:
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def _overrides(config: Config, sections: Change) -> tuple[str, ...]:
    return tuple(
        f"{section}.{key}={str(value).lower()}"
        for section, values in sections.items()
        for key, value in values.items()
        if getattr(getattr(config, section), key) != value
    )


@dataclass(frozen=True, slots=True)
class Lighter:
    """Command-line overrides, and the fullest rank's bytes with them."""

    overrides: tuple[str, ...]
    total: int


def lighter(
    config: Config, shape: ModelShape, hf_config: dict[str, Any], gpu_bytes: int | None, count: int = 4
) -> list[Lighter]:
    """Find changes that save memory on the fullest rank with the same number of ranks, largest savings first."""
    present, found = fullest_rank(config, shape, gpu_bytes).total, []
    for change in _changes(config, shape, gpu_bytes):
        changed = _with(config, change)
        if not accepts_layout(changed, hf_config, on_gpus=bool(gpu_bytes)):
            continue
        total = fullest_rank(changed, shape, gpu_bytes).total
        if total < _WORTH * present:
            overrides = tuple(f"{s}.{k}={_toml(v)}" for s, values in change.items() for k, v in values.items())
            found.append(Lighter(overrides, total))
    return sorted(found, key=lambda one: one.total)[:count]


def _changes(config: Config, shape: ModelShape, gpu_bytes: int | None) -> Iterator[Change]:
    p, t = config.parallel, config.train
    yield {"train": {"max_tokens_per_microbatch": max(1, microbatch_tokens(config) // 2)}}
    yield {"train": {"recompute": True}}
    yield {"train": {"logprob_chunk_tokens": max(_MIN_CHUNK_TOKENS, t.logprob_chunk_tokens // 4)}}
    yield {"train": {"minibatches_per_step": 2 * t.minibatches_per_step}}
    yield {"sync": {"bucket_mib": config.sync.bucket_mib / 4}}
    if runs_forwards_first(config, shape, gpu_bytes):
        yield {"train": {"schedule": "interleaved"}}
    if p.data * p.context > 1:
        yield {"optimizer": {"distributed": True}}
    if p.data % 2 == 0:
        if config.cluster.gpus_per_node % (2 * p.tensor) == 0:
            yield {"parallel": {"tensor": 2 * p.tensor, "sequence": True, "data": p.data // 2}}
        yield {"parallel": {"pipeline": 2 * p.pipeline, "data": p.data // 2}}
        yield {"parallel": {"context": 2 * p.context, "data": p.data // 2}}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
