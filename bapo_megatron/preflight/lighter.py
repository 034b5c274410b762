"""Single changes that make a trainer rank need less memory, for a run that did not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.preflight.check import accepts_layout
from bapo_megatron.preflight.memory import fullest_rank, microbatch_tokens, runs_forwards_first

_WORTH = 0.97  # of the present need: what saves less is no suggestion
_MIN_CHUNK_TOKENS = 64

Change = dict[str, dict[str, Any]]  # values by section and setting


@dataclass(frozen=True, slots=True)
class Lighter:
    """Overrides of the command line, and the bytes that the fullest rank needs with them."""

    overrides: tuple[str, ...]
    total: int


def lighter(
    config: Config, shape: ModelShape, hf_config: dict[str, Any], gpu_bytes: int | None, count: int = 4
) -> list[Lighter]:
    """Changes with as many ranks, by what the fullest rank then needs, the least first."""
    present, found = fullest_rank(config, shape, gpu_bytes).total, []
    for change in _changes(config, shape, gpu_bytes):
        sections = {name: getattr(config, name).model_copy(update=values) for name, values in change.items()}
        changed = config.model_copy(update=sections)
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
