"""Other settings: faster layouts, a better split of the GPUs over trainer and servers, and less memory."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tomli_w

from bapo_megatron.config.plan import chunk_rows, num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape, model_shape
from bapo_megatron.preflight.check import accepts_layout
from bapo_megatron.preflight.memory import fullest_rank, microbatch_tokens, runs_forwards_first
from bapo_megatron.preflight.plan import Balance, Plan, balance, make_plan

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
    shape, found = model_shape(hf_config, own=config.model.own_family), []
    limit_s = _WORTH * present.train.expected if present.fits else float("inf")
    for change in _layouts(config, shape, num_ranks(config)):
        if overrides := _overrides(config, change):
            changed = _with(config, change)
            plan = make_plan(changed, shape, present.tokens.response)
            if plan.fits and plan.train.expected < limit_s and accepts_layout(changed, hf_config, on_gpus=True):
                found.append(Suggestion(overrides, plan))
    found.sort(key=lambda s: (round(s.plan.train.expected, 1), len(s.overrides), s.plan.trainer.total))
    return found[:count]


@dataclass(frozen=True, slots=True)
class Split:
    """A split of the cluster's GPUs over trainer and servers, and the plan it leads to."""

    change: Change
    overrides: tuple[str, ...]
    config: Config
    plan: Plan
    balance: Balance

    def to_toml(self) -> str:
        """Return the split as a configuration to merge last."""
        return (
            "# Layout by `bapo plan --best`: name this file after all others.\n\n" + tomli_w.dumps(self.change).rstrip()
        ) + "\n"


def best_split(config: Config, hf_config: dict[str, Any], present: Plan) -> Split | None:
    """Find the split and layout with the shortest expected step that `bapo check` accepts, in the mode of `rollout`.

    Of each number of trainer ranks, the fastest layouts that fit meet every size of servers for the other GPUs. None
    without SGLang servers, or if nothing fits.
    """
    if not config.rollout.engine_kind.on_gpus:
        return None
    shape, found = model_shape(hf_config, own=config.model.own_family), []
    for ranks in _trainer_sizes(config):
        for layout in _fastest(config, shape, ranks, present.tokens.response):
            for servers in _servers(config, ranks):
                change = {**layout, "rollout": servers}
                changed = _with(config, change)
                plan = make_plan(changed, shape, present.tokens.response)
                if plan.fits and (of_step := balance(changed, plan)):
                    found.append(Split(change, _overrides(config, change), changed, plan, of_step))
    found.sort(key=lambda s: (round(s.balance.step_s, 1), s.plan.trainer.total))
    return next((s for s in found if accepts_layout(s.config, hf_config, on_gpus=True)), None)


def _trainer_sizes(config: Config) -> Iterator[int]:
    """Yield numbers of trainer ranks that leave GPUs to servers: of several machines, whole ones."""
    c = config.cluster
    unit = c.gpus_per_node if c.nodes > 1 else 1
    yield from range(unit, c.nodes * c.gpus_per_node, unit)


def _servers(config: Config, ranks: int) -> Iterator[dict[str, int]]:
    c = config.cluster
    for size in (s for s in range(1, c.gpus_per_node + 1) if c.gpus_per_node % s == 0):
        count, rest = divmod(c.nodes * c.gpus_per_node - ranks, size)
        if count and not rest:
            yield {"num_servers": count, "server_tensor_parallel": size}


def _fastest(config: Config, shape: ModelShape, ranks: int, response: int, count: int = 3) -> list[Change]:
    """Return the fastest layouts of so many trainer ranks that fit their memory."""
    found = []
    for change in _layouts(config, shape, ranks):
        plan = make_plan(_with(config, change), shape, response)
        if plan.trainer_fits:
            change["parallel"]["num_ranks"] = ranks
            found.append((plan.train.expected, plan.trainer.total, change))
    return [change for *_, change in sorted(found, key=lambda one: one[:2])[:count]]


def _layouts(config: Config, shape: ModelShape, ranks: int) -> Iterator[Change]:
    c = config.cluster
    split = (shape.num_heads, shape.num_kv_heads, *shape.ffn_sizes)
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


def _with(config: Config, change: Change) -> Config:
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in change.items()}
    return config.model_copy(update=changed)


def _overrides(config: Config, change: Change) -> tuple[str, ...]:
    return tuple(
        f"{section}.{key}={json.dumps(value)}"
        for section, values in change.items()
        for key, value in values.items()
        if getattr(getattr(config, section), key) != value
    )


@dataclass(frozen=True, slots=True)
class Lighter:
    """Command-line overrides, and the fullest rank's bytes with them."""

    overrides: tuple[str, ...]
    total: int


def lighter(config: Config, shape: ModelShape, hf_config: dict[str, Any], gpu_bytes: int | None) -> list[Lighter]:
    """Find changes that save memory on the fullest rank with the same number of ranks, largest savings first."""
    present, found = fullest_rank(config, shape, gpu_bytes).total, []
    for change in _changes(config, shape, gpu_bytes):
        changed = _with(config, change)
        if not accepts_layout(changed, hf_config, on_gpus=bool(gpu_bytes)):
            continue
        total = fullest_rank(changed, shape, gpu_bytes).total
        if total < _WORTH * present:
            found.append(Lighter(_overrides(config, change), total))
    return sorted(found, key=lambda one: one.total)[:4]


def _changes(config: Config, shape: ModelShape, gpu_bytes: int | None) -> Iterator[Change]:
    p, t = config.parallel, config.train
    yield {"train": {"max_tokens_per_microbatch": max(1, microbatch_tokens(config) // 2)}}
    if not t.recompute:
        yield {"train": {"recompute": True}}
        yield {"train": {"recompute": True, "recompute_modules": ("core_attn", "mlp")}}
    elif t.recompute_modules:
        yield {"train": {"recompute_modules": ()}}
    elif t.recompute_layers is not None:
        yield {"train": {"recompute_layers": shape.num_layers}}
    chunk_tokens = t.logprob_chunk_tokens or chunk_rows(
        shape.padded_vocab_size(p.tensor) // p.tensor, on_gpu=gpu_bytes is not None
    )
    yield {"train": {"logprob_chunk_tokens": max(_MIN_CHUNK_TOKENS, chunk_tokens // 4)}}
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
