"""Better settings: faster layouts, a better split of the GPUs between trainer and servers, and less memory.

Times within a tenth of the fastest count as equal, because the assumed rates are not more exact; the
plainest layout wins.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tomli_w

from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.memory import fullest_rank, microbatch_tokens, planned_chunk_rows, plans_forwards_first
from bapo_megatron.preflight.check import accepts_layout
from bapo_megatron.preflight.checks.layout import RANKS
from bapo_megatron.preflight.plan import ROOMY, Balance, RunPlan, make_plan, step_balance
from bapo_megatron.resolved import Resolved

FASTER = 0.9  # share of a time: a smaller gain is within the estimate's error
_LIGHTER = 0.97  # share of the present memory: a smaller gain is not worth a change
_MIN_CHUNK_TOKENS = 64
_MOST_NODES = 32

Change = dict[str, dict[str, Any]]  # values by section and setting

CHOSEN = (
    *RANKS,
    "parallel.num_ranks",
    "parallel.last_stage_layers",
    "parallel.expert",
    "parallel.sequence",
    "rollout.num_servers",
    "rollout.server_tensor_parallel",
    "train.recompute",
    "optimizer.distributed",
)
"""Settings that a `GPUSplit` changes, whatever their values are."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Overrides, and the resulting plan."""

    overrides: tuple[str, ...]
    plan: RunPlan


def suggest(run: Resolved, present: RunPlan, count: int = 3) -> list[Suggestion]:
    """Find the fastest layouts that `bapo check` accepts; among equally fast ones, the plainest come first.

    Args:
        present: the plan to improve on by a tenth; if it does not fit, any fitting layout counts.
    """
    found = []
    limit_s = FASTER * present.train.expected if present.fits else float("inf")
    for change in _layouts(run, run.config.parallel.size):
        if overrides := _overrides(run.config, change):
            changed = _with(run, change)
            plan = make_plan(changed, present.tokens.response)
            if plan.fits and plan.train.expected < limit_s and accepts_layout(changed, on_gpus=True):
                found.append((Suggestion(overrides, plan), (*_plainness(changed.config, plan), len(overrides))))
    fastest_s = min((s.plan.train.expected for s, _ in found), default=0.0)
    found.sort(key=lambda one: _order(one[0].plan.train.expected, fastest_s, one[1]))
    return [suggestion for suggestion, _ in found[:count]]


def _order(time_s: float, fastest_s: float, plainness: tuple[float, ...]) -> tuple[Any, ...]:
    """Return a sort key: first the equally fast layouts from plain to odd, then the others by time."""
    return (0, *plainness, time_s) if FASTER * time_s <= fastest_s else (1, time_s)


def _plainness(config: Config, plan: RunPlan) -> tuple[float, ...]:
    """Return a sort key for layouts: memory to spare, powers of two, then little communication.

    Tensor ranks, which stay on one machine and all compute, come before stages and context ranks.
    """
    p, ranks = config.parallel, config.parallel.size
    is_tight = plan.trainer.total > ROOMY * plan.gpu_memory_gib * GIB
    others = p.pipeline * p.context
    tensor = p.tensor if others == 1 else -p.tensor
    return is_tight, ranks & (ranks - 1) > 0, others, tensor, config.rollout.server_tensor_parallel


@dataclass(frozen=True, slots=True)
class GPUSplit:
    """A split of the cluster's GPUs between trainer and servers, and the resulting plan."""

    change: Change
    run: Resolved
    plan: RunPlan
    balance: Balance

    def to_toml(self) -> str:
        """Return the split as a configuration to merge last."""
        return (
            "# Layout by `bapo plan --best`: name this file after all others.\n\n" + tomli_w.dumps(self.change).rstrip()
        ) + "\n"


def best_split(run: Resolved, response_tokens: int | None = None) -> GPUSplit | None:
    """Find the split with the shortest expected step that `bapo check` accepts; among equals, the plainest.

    The configuration's own layout does not matter. The result is None if nothing fits.

    Args:
        run: it has SGLang servers and `cluster.gpu`.
        response_tokens: average response length; None means the maximum.
    """
    sizes = trainer_sizes(run.config)
    found = [split for ranks in sizes for split in fitting_splits(run, ranks, response_tokens)]
    fastest_s = min((s.balance.step_s for s in found), default=0.0)
    found.sort(key=lambda s: _order(s.balance.step_s, fastest_s, _plainness(s.run.config, s.plan)))
    return next((s for s in found if accepts_layout(s.run, on_gpus=True)), None)


def smallest_cluster(run: Resolved) -> int | None:
    """Return the smallest number of nodes, above the present one, that has room for trainer and servers; None above 32.

    Each further node makes one more size of the trainer possible, the largest.
    """
    c = run.config.cluster
    for nodes in range(c.nodes + 1, _MOST_NODES + 1):
        larger = _with(run, {"cluster": {"nodes": nodes}})
        splits = fitting_splits(larger, max(trainer_sizes(larger.config)))
        if any(accepts_layout(s.run, on_gpus=True) for s in splits):
            return nodes
    return None


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best split with another value of one setting."""

    setting: str
    best: Any  # value
    other: Any  # value
    plan: RunPlan
    step_s: float


def alternatives(split: GPUSplit) -> Iterator[Alternative]:
    """Yield the alternative to each choice of a split: half of a size, or 2 instead of 1.

    Alternatives that `bapo check` does not accept are left out.
    """
    run, config = split.run, split.run.config
    response = split.plan.tokens.response
    p, r, ranks = config.parallel, config.rollout, config.parallel.size
    for name in ("tensor", "pipeline", "context"):
        best = getattr(p, name)
        other = best // 2 if best > 1 else 2
        layout = {"tensor": p.tensor, "pipeline": p.pipeline, "context": p.context, name: other}
        layout["data"], rest = divmod(ranks, layout["tensor"] * layout["pipeline"] * layout["context"])
        layout["last_stage_layers"] = _stages(run.shape.num_layers).get(layout["pipeline"])
        change: Change = {
            "parallel": {**layout, "sequence": layout["tensor"] > 1},
            "optimizer": {"distributed": layout["data"] * layout["context"] > 1},
        }
        if not rest and layout["data"]:
            yield from _alternative(f"parallel.{name}", best, other, _with(run, change), response)
    recompute = config.train.recompute
    changed = _with(run, {"train": {"recompute": not recompute}})
    yield from _alternative("train.recompute", recompute, not recompute, changed, response)
    for size in sorted({ranks // 2, 2 * ranks} & {*trainer_sizes(config)}):
        if others := list(fitting_splits(run, size, response)):
            fastest = min(others, key=lambda s: s.balance.step_s)
            yield Alternative("parallel.num_ranks", ranks, size, fastest.plan, fastest.balance.step_s)
    best = r.server_tensor_parallel
    other = best // 2 if best > 1 else 2
    servers = {"num_servers": r.num_servers * best // other, "server_tensor_parallel": other}
    changed = _with(run, {"rollout": servers})
    if changed.placement.num_gpus == run.placement.num_gpus:
        setting = "rollout.server_tensor_parallel"
        yield from _alternative(setting, best, other, changed, response)


def _alternative(setting: str, best: Any, other: Any, changed: Resolved, response: int) -> Iterator[Alternative]:
    if accepts_layout(changed, on_gpus=True):
        plan = make_plan(changed, response)
        if of_step := step_balance(changed.config, plan):
            yield Alternative(setting, best, other, plan, of_step.step_s)


def trainer_sizes(config: Config) -> Iterator[int]:
    """Yield numbers of trainer ranks that leave GPUs for servers; with several machines, only whole ones.

    Ranks that share GPUs with the servers are as many as GPUs.
    """
    c = config.cluster
    if config.shares_gpus:
        yield c.nodes * c.gpus_per_node
        return
    unit = c.gpus_per_node if c.nodes > 1 else 1
    yield from range(unit, c.nodes * c.gpus_per_node, unit)


def fitting_splits(run: Resolved, ranks: int, response_tokens: int | None = None) -> Iterator[GPUSplit]:
    """Yield the splits with `ranks` trainer ranks that fit: each of the fastest layouts with each size of servers."""
    sizes = list(_servers(run.config, ranks))
    if not sizes:
        return
    layouts = []
    for change in _layouts(run, ranks):
        widest = sizes[-1]  # takes the least of a GPU that the trainer has too
        plan = make_plan(_with(run, {**change, "rollout": widest}), response_tokens)
        if plan.trainer_fits:
            layouts.append((plan.train.expected, change))
    fastest_s = min((time_s for time_s, _ in layouts), default=0.0)
    fast = [change for time_s, change in layouts if FASTER * time_s <= fastest_s]
    for layout, servers in itertools.product(fast, sizes):
        change = {**layout, "parallel": layout["parallel"] | {"num_ranks": ranks}, "rollout": servers}
        changed = _with(run, change)
        plan = make_plan(changed, response_tokens)
        if plan.fits and (of_step := step_balance(changed.config, plan)):
            yield GPUSplit(change, changed, plan, of_step)


def _servers(config: Config, ranks: int) -> Iterator[dict[str, int]]:
    c = config.cluster
    for size in (s for s in range(1, c.gpus_per_node + 1) if c.gpus_per_node % s == 0):
        count, rest = divmod(c.nodes * c.gpus_per_node - (0 if config.shares_gpus else ranks), size)
        if count and not rest:
            yield {"num_servers": count, "server_tensor_parallel": size}


def _layouts(run: Resolved, ranks: int) -> Iterator[Change]:
    c = run.config.cluster
    split: tuple[int, ...] = (run.shape.num_heads, run.shape.num_kv_heads, *run.shape.ffn_sizes)
    contexts = [2**n for n in range(5)]
    if run.shape.linear is not None:
        split, contexts = (*split, run.shape.linear.num_key_heads, run.shape.linear.num_value_heads), [1]
    tensors = [t for t in range(1, c.gpus_per_node + 1) if not any(n % t for n in split)]
    stages = _stages(run.shape.num_layers)
    r, t = run.config.rollout, run.config.train
    per_update = r.prompts_per_step * r.samples_per_prompt // t.minibatches_per_step
    for tensor, pipeline, context, recompute in itertools.product(tensors, stages, contexts, (False, True)):
        data, rest = divmod(ranks, tensor * pipeline * context)
        if rest or data == 0 or data > per_update or c.gpus_per_node % tensor:
            continue
        layout = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data, "sequence": tensor > 1}
        if run.config.parallel.virtual_pipeline > 1 and pipeline != run.config.parallel.pipeline:
            layout["virtual_pipeline"] = 1
        if run.shape.num_layers % pipeline or run.config.parallel.last_stage_layers is not None:
            layout["last_stage_layers"] = stages[pipeline]
        for expert in _expert_sizes(run.shape, tensor * context * data, c.gpus_per_node):
            yield {
                "parallel": layout | expert,
                "train": {"recompute": recompute},
                "optimizer": {"distributed": data * context > 1},
            }


def _stages(num_layers: int) -> dict[int, int]:
    """Return numbers of stages with the layers of the last one, which may have fewer than the others, by up to a half.

    Example: 94 layers give {1: 94, 2: 47, 4: 22, 8: 10, 16: 4, 47: 2, 94: 1}; four stages have 24, 24, 24 and 22.
    """
    stages = {}
    for count in range(1, num_layers + 1):
        others = math.ceil(num_layers / count)
        last = num_layers - (count - 1) * others
        if last == others or (2 * last > others and count.bit_count() == 1):
            stages[count] = last
    return stages


def _expert_sizes(shape: ModelShape, ranks: int, gpus_per_node: int) -> list[dict[str, int]]:
    """Return values of `parallel.expert`: the largest, and the largest within a machine; none for a dense model."""
    if shape.experts is None:
        return [{}]
    largest = math.gcd(shape.experts.num_experts, ranks)
    return [{"expert": size} for size in dict.fromkeys((math.gcd(largest, gpus_per_node), largest))]


def _with(run: Resolved, change: Change) -> Resolved:
    changed = {name: getattr(run.config, name).model_copy(update=values) for name, values in change.items()}
    return run.changed(run.config.model_copy(update=changed))


def _overrides(config: Config, change: Change) -> tuple[str, ...]:
    return tuple(
        f"{section}.{key}={json.dumps(value)}"
        for section, values in change.items()
        for key, value in values.items()
        if getattr(getattr(config, section), key) != value
    )


@dataclass(frozen=True, slots=True)
class Lighter:
    """Command-line overrides, and the fullest rank's memory with them, in bytes."""

    overrides: tuple[str, ...]
    total: int


def lighter(run: Resolved, gpu_bytes: int | None) -> list[Lighter]:
    """Find changes that save memory on the fullest rank with the same number of ranks, largest savings first."""
    present, found = fullest_rank(run, gpu_bytes).total, []
    for change in _changes(run, gpu_bytes):
        changed = _with(run, change)
        if not accepts_layout(changed, on_gpus=bool(gpu_bytes)):
            continue
        total = fullest_rank(changed, gpu_bytes).total
        if total < _LIGHTER * present:
            found.append(Lighter(_overrides(run.config, change), total))
    return sorted(found, key=lambda one: one.total)[:4]


def _changes(run: Resolved, gpu_bytes: int | None) -> Iterator[Change]:
    p, t = run.config.parallel, run.config.train
    yield {"train": {"max_tokens_per_microbatch": max(1, microbatch_tokens(run.config) // 2)}}
    if not t.recompute:
        yield {"train": {"recompute": True}}
        yield {"train": {"recompute": True, "recompute_modules": ("core_attn", "mlp")}}
    elif t.recompute_modules:
        yield {"train": {"recompute_modules": ()}}
    elif t.recompute_layers is not None:
        yield {"train": {"recompute_layers": run.shape.num_layers}}
    chunk_tokens = planned_chunk_rows(run, on_gpu=gpu_bytes is not None)
    yield {"train": {"logprob_chunk_tokens": max(_MIN_CHUNK_TOKENS, chunk_tokens // 4)}}
    yield {"train": {"minibatches_per_step": 2 * t.minibatches_per_step}}
    yield {"sync": {"bucket_mib": run.config.sync.bucket_mib / 4}}
    if plans_forwards_first(run, gpu_bytes):
        yield {"train": {"schedule": "interleaved"}}
    if p.data * p.context > 1:
        yield {"optimizer": {"distributed": True}}
    if run.shape.experts is not None:
        yield {"parallel": {"expert": 2 * p.expert}}
    if p.data % 2 == 0:
        if run.config.cluster.gpus_per_node % (2 * p.tensor) == 0:
            yield {"parallel": {"tensor": 2 * p.tensor, "sequence": True, "data": p.data // 2}}
        yield {"parallel": {"pipeline": 2 * p.pipeline, "data": p.data // 2}}
        yield {"parallel": {"context": 2 * p.context, "data": p.data // 2}}
