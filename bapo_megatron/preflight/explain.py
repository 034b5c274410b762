"""A run and its plan, as text for the terminal."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bapo_megatron.assets import model_folder
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, ConfigError, plural
from bapo_megatron.hf.splits import is_trained
from bapo_megatron.hf.tokenizer import reads_clock
from bapo_megatron.machine.gpus import FULL, GIB
from bapo_megatron.machine.memory import UNEVEN_LOAD, TrainerMemory, fullest_rank, max_microbatches
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.machine.shared_gpu import CONTEXT_BYTES, GRAPHS_BYTES, SharedGPU
from bapo_megatron.preflight.check import accepts_layout
from bapo_megatron.preflight.plan import (
    COMPUTE_SHARE,
    HOST_BYTES_PER_S,
    LINK_SHARE,
    RunPlan,
    Seconds,
    make_plan,
    memory_problems,
    step_balance,
)
from bapo_megatron.preflight.suggest import (
    Alternative,
    GPUSplit,
    Suggestion,
    alternatives,
    best_split,
    smallest_cluster,
    suggest,
)
from bapo_megatron.resolved import Resolved
from bapo_megatron.runtime import memory_bytes


def outline(run: Resolved) -> str:
    """Summarise a run in a few lines."""
    config = run.config
    p, r, t = config.parallel, config.rollout, config.train
    num_sequences = r.prompts_per_step * r.samples_per_prompt
    num_updates = t.minibatches_per_step * t.epochs_per_step
    partial = f"{plural(r.tokens_per_round, 'token')} a round" if r.tokens_per_round else "off"
    num_servers = run.placement.num_servers or len(r.urls)
    engines = plural(num_servers, run.engine.title) if run.engine.samples else "recorded batches"
    return "\n".join(
        [
            f"run        {config.run.name}: {plural(t.num_steps, 'step')}, "
            f"{plural(t.num_steps * num_updates, 'optimizer update')}",
            f"trainer    {plural(config.parallel.size, 'rank')} = tensor {p.tensor} x pipeline {p.pipeline} x context "
            f"{p.context} x data {p.data}{f', experts shared out over {p.expert}' if p.expert > 1 else ''}",
            f"step       {plural(r.prompts_per_step, 'prompt')} x {plural(r.samples_per_prompt, 'sample')} = "
            f"{plural(num_sequences, 'sequence')}, at most "
            f"{plural(num_sequences * r.max_response_tokens, 'response token', ',')}",
            f"updates    {plural(t.minibatches_per_step, 'mini-batch')} of "
            f"{plural(num_sequences // t.minibatches_per_step, 'sequence')} x {plural(t.epochs_per_step, 'epoch')} = "
            f"{num_updates} a step",
            f"forward    at most {plural(max_microbatches(config), 'micro-batch')} of "
            f"{plural(t.max_tokens_per_microbatch, 'token')} per rank and update",
            *_adapters(run),
            f"rollout    {engines}, {plural(r.groups_in_flight or r.prompts_per_step, 'group')} in flight, "
            f"partial rollout {partial}",
            *_turns(config),
            *_teachers(config.teacher.path_by_source),
            *_clock(config),
        ]
    )


def _adapters(run: Resolved) -> list[str]:
    """Return a line about LoRA, if adapters are trained."""
    if (one := run.config.lora.adapters) is None:
        return []
    size = ""
    if run.model is not None:
        trained, total = model_parameters(run.shape, is_trained), model_parameters(run.shape)
        size = f"{trained:,} parameters, {trained / total:.2%} of the model's, in "
    return [f"adapters   LoRA of rank {one.rank} trains {size}{', '.join(one.targets)}"]


def _turns(config: Config) -> list[str]:
    """Return a line about the environment, if there is one."""
    one = config.environment
    limits = f"at most {plural(one.max_turns, 'turn')}, answers of at most {plural(one.max_answer_tokens, 'token')}"
    return [f"turns      {one.kind} answers: {limits}"] if one.is_used else []


def _teachers(path_by_source: Mapping[str, str]) -> list[str]:
    """Return a line about several teachers in the trainer, if there are any."""
    sources: dict[str, list[str]] = defaultdict(list)
    for source, path in path_by_source.items():
        sources[path].append(source)
    each = (f"{path} for {', '.join(names)}" for path, names in sources.items())
    return [f"teachers   {'; '.join(each)}"] if sources else []


def _clock(config: Config) -> list[str]:
    """Return a line about a chat template that reads the clock."""
    if not config.data.chat_template:
        return []
    try:
        is_read = reads_clock(model_folder(config.model.path))
    except CheckpointError:  # the hub cannot be reached, and a plan does without it
        return []
    time = config.data.template_time or "the run's start, which its config.toml keeps as data.template_time"
    return [f"template   reads the clock; it gets {time}"] if is_read else []


def plan_text(run: Resolved) -> str:
    """Return the plan of a checked configuration, without suggestions."""
    return "\n".join(_lines(run, make_plan(run)))


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan of a run as text."""

    verdict: str
    """Three lines: whether it fits, how long a step takes, what to change."""
    needs: str
    """Memory, work and time, and faster layouts."""
    problems: list[str]
    """What exceeds the memory of the cluster's GPUs."""


def explain_plan(run: Resolved, response_tokens: int | None = None) -> Explanation:
    """Explain the plan. Without `cluster.gpu`, the plan is the memory of a rank on CPUs.

    Args:
        response_tokens: average response length; None means the maximum.
    """
    config = run.config
    if config.cluster.gpu is None:
        memory, have = fullest_rank(run), memory_bytes() / GIB
        need = memory.total / GIB
        ranks = config.parallel.size
        processes = plural(ranks, "trainer process")
        verdict = [
            f"fits       {'yes' if ranks * need <= have else 'no'}: {processes}, each of {need:.2f} GiB at "
            f"most; this machine has {have:.1f} GiB, for engines too",
            "time       not estimated on CPUs",
            "change     set cluster.gpu, or merge a file of clusters/, to plan for GPUs",
        ]
        return Explanation("\n".join(verdict), "\n".join(_memory(memory, "process on CPUs")), [])
    plan = make_plan(run, response_tokens)
    found = [] if _is_too_small(config, plan) else suggest(run, plan)
    problems = [v.message for v in memory_problems(run, plan)]
    verdict = [_fit(plan), _time(config, plan), f"change     {_change(run, plan, found)}"]
    return Explanation("\n".join(verdict), "\n".join([*_lines(run, plan), *_suggestions(found)]), problems)


def _fit(plan: RunPlan) -> str:
    need, have = plan.trainer.total / GIB, FULL * plan.gpu_memory_gib
    trainer = f"a trainer GPU needs {need:.1f} of {have:.1f} GiB"
    if plan.shared is not None and plan.shared.takes_turns:
        phases = ", ".join(f"{name} {sum(both) / GIB:.1f}" for name, both in plan.shared.phases.items())
        trainer = f"each GPU needs for {phases} of {have:.1f} GiB"
    elif plan.shared is not None:
        of_server = plan.shared.server_bytes / GIB
        trainer = f"each GPU's trainer rank needs {need:.1f} and its server {of_server:.1f} of {have:.1f} GiB"
    if plan.server is None:
        return f"fits       {'yes' if plan.fits else 'no'}: {trainer}"
    responses = plural(plan.server.concurrency, "response")
    return f"fits       {'yes' if plan.fits else 'no'}: {trainer}; a server holds {responses} of full length"


def _time(config: Config, plan: RunPlan) -> str:
    """Return the line about a step's time."""
    if not plan.fits:
        return "time       no step is possible"
    if (of_step := step_balance(config, plan)) is None or plan.rollout is None:
        return f"time       {time_text(plan.train.expected)} of training a step expected; sampling is not estimated"
    if _is_too_small(config, plan):
        return f"time       {_TOO_SMALL}"
    parts = f"training {time_text(plan.train.expected)}, sampling {time_text(plan.rollout.expected)}"
    parts += f", moves {time_text(plan.moves_s)}" if plan.moves_s else ""
    return f"time       {time_text(of_step.step_s)} a step expected ({of_step.mode}): {parts}"


def _change(run: Resolved, plan: RunPlan, found: Sequence[Suggestion]) -> str:
    """Say what to change: the first suggestion, or where to find more."""
    can_split = run.engine.on_gpus
    if found:
        first = found[0]
        time_s = time_text(first.plan.train.expected)
        return f"{' '.join(first.overrides)}: {first.plan.trainer.total / GIB:.1f} GiB, training {time_s}"
    if plan.fits:
        asks_best = can_split and not _is_too_small(run.config, plan)
        return "nothing in the trainer's layout" + (": see --best for the split of the GPUs" if asks_best else "")
    if can_split and best_split(run, plan.tokens.response):
        return "the split of the GPUs: --best finds one that fits"
    return _larger_cluster(run) if can_split else "the number of trainer GPUs: too few"


def _larger_cluster(run: Resolved) -> str:
    c = run.config.cluster
    here = f"no layout fits on {plural(c.nodes * c.gpus_per_node, 'GPU')}"
    if run.placement.shares_gpus:
        return f"{here} that trainer and servers share; raise cluster.gpus_per_node, or shorten responses"
    nodes = smallest_cluster(run)
    if nodes is None:
        return f"{here}, nor on a larger cluster; set a smaller train.max_tokens_per_microbatch, or shorter responses"
    return f"{here}; the smallest cluster that does is {plural(nodes, 'node')}: set cluster.nodes={nodes}"


def explain_best(run: Resolved, response_tokens: int | None = None) -> tuple[str, GPUSplit]:
    """Return the best split of the GPUs, and a text that compares it with the present one if that is possible.

    Raises:
        ConfigError: there is nothing to split, or nothing fits.
    """
    c = run.config.cluster
    if c.gpu is None or not run.engine.on_gpus:
        raise ConfigError(
            "--best splits the GPUs of [cluster] over trainer and SGLang servers; set cluster.gpu and "
            'rollout.engine="sglang", or merge a file of clusters/, such as clusters/1x8-h100'
        )
    best = best_split(run, response_tokens)
    if best is None:
        raise ConfigError(_larger_cluster(run))
    lines: list[str] = []
    if accepts_layout(run, on_gpus=True) and run.placement.num_gpus <= c.nodes * c.gpus_per_node:
        lines += _split("present", run.config, make_plan(run, response_tokens))
    chosen = best.run.config
    lines += _split("best", chosen, best.plan)
    p = chosen.parallel
    lines.append(
        f"           tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} x data {p.data}, recompute "
        f"{'on' if chosen.train.recompute else 'off'}; {best.plan.trainer.total / GIB:.1f} of "
        f"{FULL * best.plan.gpu_memory_gib:.1f} GiB of a trainer GPU"
    )
    label = "why"
    for one in () if _is_too_small(chosen, best.plan) else alternatives(best):
        choice = f"{one.setting}={_shown(one.best)}"
        lines.append(f"{label:<10} {choice:<34} {_against(one, best)}")
        label = ""
    return "\n".join(lines), best


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _against(one: Alternative, best: GPUSplit) -> str:
    """Say why an alternative was not chosen."""
    other, plan = _shown(one.other), one.plan
    if not plan.trainer_fits:
        have = FULL * plan.gpu_memory_gib
        return f"{other}: a trainer GPU would need {plan.trainer_needs / GIB:.1f} GiB of {have:.1f}"
    if not plan.fits:
        return f"{other}: a server would have no room for a response of full length"
    change = one.step_s / best.balance.step_s - 1
    length = f"{abs(change):.0%} {'longer' if change > 0 else 'shorter'}" if abs(change) >= 0.005 else "as long"
    return f"{other}: a step would be {length}, with {plan.trainer.total / GIB:.1f} GiB of a trainer GPU"


def _split(name: str, config: Config, plan: RunPlan) -> Iterator[str]:
    r = config.rollout
    if not plan.fits:
        yield f"{name:<10} does not fit"
        return
    yield (
        f"{name:<10} trainer {plural(config.parallel.size, 'GPU')}, servers {r.num_servers} x "
        f"{plural(r.server_tensor_parallel, 'GPU')}: "
        f"train {time_text(plan.train.expected)}, rollout {time_text(plan.rollout.expected if plan.rollout else 0.0)}"
    )
    yield from _balance(config, plan)


def _balance(config: Config, plan: RunPlan) -> Iterator[str]:
    if found := step_balance(config, plan):
        if _is_too_small(config, plan):
            yield f"balance    {_TOO_SMALL}"
            return
        yield (
            f"balance    a step of {time_text(found.step_s)} expected ({found.mode}): "
            f"trainer idle {found.trainer_idle:.0%}, servers idle {found.servers_idle:.0%}"
        )


PLANNED_S = 1.0
"""The shortest step whose time is worth planning."""
_TOO_SMALL = "too small to plan: less than 1 s a step; requests, judges and Python, which no plan has, take longer"


def _is_too_small(config: Config, plan: RunPlan) -> bool:
    of_step = step_balance(config, plan)
    return plan.fits and of_step is not None and of_step.step_s < PLANNED_S


def _lines(run: Resolved, plan: RunPlan) -> Iterator[str]:
    c, tokens, placement = run.config.cluster, plan.tokens, run.placement
    shared = f"of which the servers share {placement.num_server_gpus}" if plan.shared is not None else ""
    yield (
        f"cluster    {c.nodes} x {c.gpus_per_node} {plan.gpu.name}: {plural(placement.num_ranks, 'GPU')} for the "
        f"trainer, {shared or f'{placement.num_server_gpus} for servers'}, "
        f"{c.nodes * c.gpus_per_node - placement.num_gpus} idle"
    )
    yield from _memory(
        plan.trainer,
        "trainer GPU",
        f"of {plan.gpu_memory_gib:.1f}; a run may fill {FULL:.0%}, {FULL * plan.gpu_memory_gib:.1f}",
    )
    if plan.shared is not None:
        yield from _in_turns(plan.shared) if plan.shared.takes_turns else _together(plan.shared)
    if plan.num_active < plan.num_parameters:
        yield f"experts    a token uses {plan.num_active:,} of the model's {plan.num_parameters:,} parameters"
    if held := plan.trainer.held.expert:
        yield f"           a rank holds {held:,} in experts; memory for {UNEVEN_LOAD:.0%} more rows than an even load"
    if s := plan.server:
        states = f", {s.state_cache / GIB:.1f} GiB states" if s.state_bytes else ""
        yield (
            f"server     {s.weights / GIB:.1f} GiB weights{states} and {max(0, s.kv_cache) / GIB:.1f} GiB KV cache on "
            f"a GPU: {plural(s.kv_tokens, 'token', ',')}, {plural(s.concurrency, 'concurrent response')} of full length"
        )
    yield (
        f"work       {plural(tokens.total, 'token', ',')} a step, {tokens.response:,} a response; {_flop(plan.flops)}"
    )
    for name, seconds in (("train", plan.train), ("rollout", plan.rollout)):
        if seconds is not None:
            yield f"{name:<10} {_span(seconds)} a step"
    yield (
        f"mfu        {plan.mfu:.0%} expected while training; recomputed: {plan.recompute}; logits of "
        f"{plan.chunk_rows:,} rows at a time"
    )
    if plan.unused:
        yield f"not used   {', '.join(plan.unused)}"
    if plan.host_bytes:
        what = "weights and state while the servers sample" if plan.moves_s else "copies of checkpoints"
        yield f"host       {plan.host_bytes / 1e9:.0f} GB of each trainer node's memory, for {what}"
    if plan.moves_s:
        yield (
            f"moves      {plan.down_bytes / 1e9:.1f} GB down from each GPU and {plan.up_bytes / 1e9:.1f} GB up in each "
            f"step, {time_text(plan.moves_s)} at {HOST_BYTES_PER_S / 1e9:.0f} GB/s, assumed"
        )
    if plan.rows_bytes:
        of_server = ""
        if plan.server and plan.server.routes:
            of_server = f", {plan.server.routes / 1e9:.1f} GB for each server GPU"
        yield f"token rows {plan.rows_bytes / 1e9:.1f} GB of memory on trainer rank 0's node{of_server}"
    yield from _balance(run.config, plan)
    yield f"sync       {plan.sync_bytes / 1e9:.1f} GB, {_span(plan.sync)}"
    yield (
        f"           times by roofline: at peak rates; at {COMPUTE_SHARE:.0%} of compute, {LINK_SHARE:.0%} of bandwidth"
    )


def _together(shared: SharedGPU) -> Iterator[str]:
    """Yield the parts of a GPU that a trainer rank and a server share, as two columns and their sum."""
    t, s, rest = shared.trainer, shared.server, shared.rest
    kept = t.reference + t.teachers + t.critic + t.fp8 + t.batch
    parts = (
        ("weights", t.weights, s.weights),
        ("state", t.gradients + t.optimizer + kept, max(0, s.kv_cache) + s.state_cache),
        ("a step", t.total - t.weights - t.gradients - t.optimizer - kept - t.context, rest.work),
        ("context", t.context, CONTEXT_BYTES + GRAPHS_BYTES),
        ("peak", t.total, shared.server_bytes),
        ("may take", shared.trainer_bytes, shared.server_bytes),
    )
    notes = {"state": "gradients and Adam; caches", "context": "CUDA and NCCL; CUDA and graphs, assumed"}
    yield f"together   GiB on each GPU{'trainer':>13}{'server':>10}{'sum':>10}"
    for name, trainer, server in parts:
        row = f"{trainer / GIB:21.2f}{server / GIB:10.2f}{(trainer + server) / GIB:10.2f}"
        yield f"           {name:<9}{row}  {notes.get(name, '')}".rstrip()


def _in_turns(shared: SharedGPU) -> Iterator[str]:
    """Yield what a trainer rank and a server hold in each phase, as columns and their sums."""
    yield f"in turns   GiB on each GPU{''.join(f'{name:>12}' for name in shared.phases)}"
    trainer, server = zip(*shared.phases.values(), strict=True)
    sums = [sum(both) for both in shared.phases.values()]
    for name, row in (("trainer", trainer), ("server", server), ("sum", sums)):
        note = f"  of {FULL * shared.gpu_bytes / GIB:.2f}" if name == "sum" else ""
        yield f"           {name:<15}{''.join(f'{num_bytes / GIB:12.2f}' for num_bytes in row)}{note}"


def _memory(memory: TrainerMemory, where: str, limit: str = "") -> Iterator[str]:
    trained = "" if memory.trained == memory.held else f", of which {memory.trained.total:,} are trained"
    held = f"{memory.held.total:,} parameters{trained}"
    yield f"memory     GiB on the fullest {where}: pipeline stage {memory.stage}, {held}"
    for name, value, note in memory_parts(memory):
        yield f"           {name:<12}{value / GIB:8.2f}  {note}".rstrip()
    yield f"           {'peak':<12}{memory.total / GIB:8.2f}  {limit}".rstrip()


def _suggestions(suggestions: Sequence[Suggestion]) -> Iterator[str]:
    for number, s in enumerate(suggestions, start=1):
        yield (
            f"try {number}      {' '.join(s.overrides)}: {s.plan.trainer.total / GIB:.1f} GiB, "
            f"training expected {time_text(s.plan.train.expected)}"
        )


def memory_parts(memory: TrainerMemory) -> list[tuple[str, int, str]]:
    """List the parts as (name, bytes, note)."""
    return [
        ("weights", memory.weights, ""),
        ("gradients", memory.gradients, "float32"),
        ("optimizer", memory.optimizer, "Adam's moments and float32 weights"),
        *([("reference", memory.reference, "weights of the KL term's reference")] if memory.reference else []),
        *([("teachers", memory.teachers, "weights")] if memory.teachers else []),
        *([("critic", memory.critic, "its weights, gradients and optimizer")] if memory.critic else []),
        *([("FP8 operands", memory.fp8, "assumed")] if memory.fp8 else []),
        ("batch", memory.batch, "ids, log-probs and other values of its tokens"),
        ("CUDA, NCCL", memory.context, "assumed"),
        ("activations", memory.activations, "kept for the backward pass"),
        ("working", memory.working, "for the layer, or rows, being differentiated"),
        ("logits", memory.logits, "one chunk"),
        ("or: update", memory.update, "not at the same time as the previous three"),
        ("or: buckets", memory.sync, "not at the same time as activations, on rank 0"),
    ]


def _span(seconds: Seconds) -> str:
    return f"at least {time_text(seconds.least)}, expected {time_text(seconds.expected)}"


def time_text(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else _milliseconds(seconds)
    if seconds < 7200:
        return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _flop(flops: float) -> str:
    return f"{flops / 1e15:,.0f} PFLOP" if flops >= 10e15 else f"{flops / 1e12:,.0f} TFLOP"


def _milliseconds(seconds: float) -> str:
    return f"{float(f'{1000 * seconds:.2g}'):g} ms" if seconds >= 0.001 else "less than 1 ms"
