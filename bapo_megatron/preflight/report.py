"""The plan as text for the terminal."""

import math
from collections.abc import Iterator, Sequence

from bapo_megatron.config.plan import num_ranks
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, plural
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.preflight.known import GIB, planned_config
from bapo_megatron.preflight.memory import TrainerMemory, fullest_rank
from bapo_megatron.preflight.plan import COMPUTE_SHARE, LINK_SHARE, Plan, Seconds, balance, make_plan, memory_problems
from bapo_megatron.preflight.suggest import Suggestion, best_split, suggest


def describe(config: Config) -> str:
    """Return the plan of a checked configuration, without suggestions."""
    return "\n".join(
        _lines(config, make_plan(config, model_shape(planned_config(config.model.path), own=config.model.own_family)))
    )


def explain(config: Config, response_tokens: int | None = None) -> tuple[str, list[str]]:
    """Return the plan with suggestions, and the memory problems. Without `cluster.gpu`: memory of a rank on CPUs.

    Args:
        response_tokens: average response length; None takes the maximum.
    """
    hf_config = planned_config(config.model.path)
    shape = model_shape(hf_config, own=config.model.own_family)
    if config.cluster.gpu is None:
        return "\n".join(_memory(fullest_rank(config, shape), "process on CPUs")), []
    plan = make_plan(config, shape, response_tokens)
    lines = [*_lines(config, plan), *_suggestions(suggest(config, hf_config, plan))]
    return "\n".join(lines), [v.message for v in memory_problems(config, plan)]


def explain_best(config: Config, response_tokens: int | None = None) -> tuple[str, str]:
    """Return the best split of the GPUs together with the present one, and its TOML.

    Raises:
        ConfigError: there is nothing to split, or nothing fits.
    """
    hf_config = planned_config(config.model.path)
    if config.cluster.gpu is None or not config.rollout.engine_kind.on_gpus:
        raise ConfigError(
            "--best splits the GPUs of [cluster] over trainer and SGLang servers; set cluster.gpu and "
            'rollout.engine="sglang", or merge a file of configs/clusters'
        )
    plan = make_plan(config, model_shape(hf_config, own=config.model.own_family), response_tokens)
    best = best_split(config, hf_config, plan)
    if best is None:
        raise ConfigError(
            f"no split of cluster.nodes={config.cluster.nodes} x {config.cluster.gpus_per_node} GPUs has room for the "
            "trainer and a server; add machines, or set a smaller train.max_tokens_per_microbatch"
        )
    lines = [
        *_split("present", config, plan),
        *_split("best", best.config, best.plan),
        f"           {' '.join(best.overrides) or 'the present split'}",
    ]
    return "\n".join(lines), best.to_toml()


def _split(name: str, config: Config, plan: Plan) -> Iterator[str]:
    r = config.rollout
    yield (
        f"{name:<10} trainer {plural(num_ranks(config), 'GPU')}, servers {r.num_servers} x "
        f"{plural(r.server_tensor_parallel, 'GPU')}: "
        f"train {amount(plan.train.expected)}, rollout {amount(plan.rollout.expected if plan.rollout else 0.0)}"
    )
    yield from _balance(config, plan)


def _balance(config: Config, plan: Plan) -> Iterator[str]:
    if found := balance(config, plan):
        yield (
            f"balance    a step of {amount(found.step_s)} expected ({found.mode}): "
            f"trainer idle {found.trainer_idle:.0%}, servers idle {found.servers_idle:.0%}"
        )


def _lines(config: Config, plan: Plan) -> Iterator[str]:
    c, r, tokens = config.cluster, config.rollout, plan.tokens
    on_servers = r.num_servers * r.server_tensor_parallel if plan.server else 0
    yield (
        f"cluster    {c.nodes} x {c.gpus_per_node} {plan.gpu.name}: {plural(num_ranks(config), 'GPU')} for the trainer"
        f", {on_servers} for servers, {c.nodes * c.gpus_per_node - num_ranks(config) - on_servers} idle"
    )
    yield from _memory(plan.trainer, "trainer GPU", f"of {plan.gpu_memory_gib:.1f}")
    if s := plan.server:
        yield (
            f"server     {s.weights / GIB:.1f} GiB weights and {max(0, s.kv_cache) / GIB:.1f} GiB KV cache on a GPU: "
            f"{plural(s.kv_tokens, 'token', ',')}, {plural(s.concurrency, 'response')} of full length at once"
        )
    yield (
        f"work       {tokens.total / 1e6:.1f}M tokens a step, {tokens.response} a response; "
        f"{plan.flops / 1e15:,.0f} PFLOP"
    )
    for name, seconds in (("train", plan.train), ("rollout", plan.rollout)):
        if seconds is not None:
            yield f"{name:<10} {_span(seconds)} a step"
    yield from _balance(config, plan)
    yield f"sync       {plan.sync_bytes / 1e9:.1f} GB, {_span(plan.sync)}"
    yield (
        f"           times by roofline: at peak rates; at {COMPUTE_SHARE:.0%} of compute, {LINK_SHARE:.0%} of bandwidth"
    )


def _memory(memory: TrainerMemory, where: str, limit: str = "") -> Iterator[str]:
    yield (
        f"memory     GiB of a {where}, the fullest: pipeline stage {memory.stage}, {memory.num_parameters:,} parameters"
    )
    for name, value, note in memory_parts(memory):
        yield f"           {name:<12}{value / GIB:8.2f}  {note}".rstrip()
    yield f"           {'peak':<12}{memory.total / GIB:8.2f}  {limit}".rstrip()


def _suggestions(suggestions: Sequence[Suggestion]) -> Iterator[str]:
    for number, s in enumerate(suggestions, start=1):
        yield (
            f"try {number}      {' '.join(s.overrides)}: {s.plan.trainer.total / GIB:.1f} GiB, "
            f"training expected {amount(s.plan.train.expected)}"
        )


def memory_parts(memory: TrainerMemory) -> list[tuple[str, int, str]]:
    """List the parts as (name, bytes, note)."""
    return [
        ("weights", memory.weights, ""),
        ("gradients", memory.gradients, "float32"),
        ("optimizer", memory.optimizer, "Adam's moments and float32 weights"),
        *([("reference", memory.reference, "weights of the KL term's policy")] if memory.reference else []),
        *([("critic", memory.critic, "its weights, gradients and optimizer")] if memory.critic else []),
        *([("FP8 operands", memory.fp8, "assumed")] if memory.fp8 else []),
        ("batch", memory.batch, "token ids, log-probs, advantages"),
        ("CUDA, NCCL", memory.context, "assumed"),
        ("activations", memory.activations, "kept for the backward pass"),
        ("working", memory.working, "of the layer, or rows, being differentiated"),
        ("logits", memory.logits, "one chunk"),
        ("or: update", memory.update, "at another time than the three before"),
        ("or: buckets", memory.sync, "at another time than activations, on rank 0"),
    ]


def _span(seconds: Seconds) -> str:
    return f"at least {amount(seconds.least)}, expected {amount(seconds.expected)}"


def amount(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
