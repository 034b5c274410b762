"""Settings that have no effect because of others: a table, and the warnings and errors that follow from it."""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from bapo_megatron.config.base import Violation
from bapo_megatron.config.engines import EngineKind
from bapo_megatron.config.losses import losses_with
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.resolved import Resolved

_SERVED = "teacher.urls teacher.urls_by_source"
_TEACHER = f"teacher.path teacher.path_by_source {_SERVED} teacher.hint"


@dataclass(frozen=True, slots=True)
class Idle:
    """Settings that act only under a condition.

    Example: Idle("run.standby", "run.max_restarts", lambda c, _: c.run.max_restarts > 0, "run.max_restarts=3")
    """

    settings: str  # names, separated by blanks; "bapo.*" is a whole section
    on: str  # settings that `act` reads; the engine's kind follows from rollout.engine
    act: Callable[[Config, EngineKind], bool]
    needed: str  # what a user must set for them to act
    refused: str | None = None  # why setting them would mislead; makes it an error instead of a warning


_BOUNDS = "loss.name loss.search_bounds"
_OF_RESPONSES = ", ".join(losses_with(lambda section: section.reads_responses))

IDLE = (
    Idle(
        "bapo.*",
        "loss.name",
        lambda c, _: not c.loss.reads_responses,
        'loss.name="bapo"',
        f"the search chooses bounds of a token's ratio, but these losses read whole responses: {_OF_RESPONSES}",
    ),
    Idle("bapo.*", _BOUNDS, lambda c, _: c.loss.searches_bounds, 'loss.name="bapo"'),
    Idle(
        "bapo.rho0 bapo.contribution bapo.token_weight bapo.order",
        f"bapo.scope {_BOUNDS}",
        lambda c, _: not c.loss.searches_bounds or c.bapo.scope != "fixed",
        'bapo.scope="exact"',
    ),
    Idle("bapo.smoothing_updates", "bapo.scope", lambda c, _: c.bapo.scope == "smoothed", 'bapo.scope="smoothed"'),
    Idle(
        "monitor.mismatch_action",
        "monitor.mismatch_alarm rollout.top_p rollout.top_k model.replay_routes rollout.tokens_per_round "
        "rollout.abort_tail rollout.overlap",
        lambda c, _: c.monitor.mismatch_alarm is not None or not c.expects_mismatch,
        "monitor.mismatch_alarm=0.1",
    ),
    Idle(
        "loss.reference_path loss.kl_estimator", "loss.kl_coef", lambda c, _: c.loss.kl_coef > 0, "loss.kl_coef=0.001"
    ),
    Idle(
        "loss.importance_level loss.importance_kind loss.importance_floor loss.importance_cap",
        "loss.proximal",
        lambda c, _: getattr(c.loss, "proximal", "learner") == "learner",
        'loss.proximal="learner"',
        "the ratio to the policy that sampled a token is its importance weight already",
    ),
    Idle(
        "loss.filter_level",
        "loss.proximal",
        lambda c, _: getattr(c.loss, "proximal", "learner") == "learner",
        'loss.proximal="learner"',
        "the filter is of the ratio from the learner at the start of the step to the policy that sampled",
    ),
    Idle(
        "loss.filter_kind loss.filter_floor loss.filter_cap",
        "loss.filter_level",
        lambda c, _: getattr(c.loss, "filter_level", "token") is not None,
        'loss.filter_level="geometric"',
    ),
    Idle(
        "optimizer.min_lr_ratio optimizer.total_updates",
        "optimizer.schedule",
        lambda c, _: c.optimizer.schedule != "constant",
        'optimizer.schedule="cosine"',
    ),
    Idle(
        "train.recompute_layers train.recompute_modules",
        "train.recompute",
        lambda c, _: bool(c.train.recompute),
        "train.recompute=true",
    ),
    Idle(
        "parallel.overlap_communication",
        "parallel.data parallel.context cluster.gpu",
        lambda c, _: c.parallel.data * c.parallel.context > 1 or c.cluster.gpu is not None,
        "parallel.data above 1",
    ),
    Idle("train.share_prompts", "parallel.context", lambda c, _: c.parallel.context == 1, "parallel.context=1"),
    Idle(
        "train.share_prompts train.deal",
        "rollout.samples_per_prompt",
        lambda c, _: c.rollout.samples_per_prompt > 1,
        "rollout.samples_per_prompt above 1",
    ),
    Idle(
        "train.deal",
        "train.minibatches_per_step",
        lambda c, _: c.train.minibatches_per_step > 1,
        "train.minibatches_per_step above 1",
    ),
    Idle(
        "critic.*",
        "advantage.kind",
        lambda c, _: not c.advantage.compares_responses,
        'advantage.kind="gae" or "n_step"',
    ),
    Idle(
        "advantage.gamma",
        "advantage.kind",
        lambda c, _: c.advantage.discounts,
        'advantage.kind="gae", "n_step", "grpo_turns" or "reinforce_plus_plus"',
    ),
    Idle(
        "advantage.whiten_tokens",
        "advantage.kind",
        lambda c, _: not c.advantage.compares_responses,
        'advantage.kind="gae" or "n_step"',
    ),
    Idle("teacher.coef", _TEACHER, lambda c, _: bool(c.teacher.given), "teacher.path, teacher.urls or teacher.hint"),
    Idle(
        "teacher.timeout_s",
        f"{_SERVED} teacher.hint",
        lambda c, _: c.teacher.is_served,
        "teacher.urls or teacher.hint",
    ),
    Idle("teacher.api_key", _SERVED, lambda c, _: bool(c.teacher.all_urls), "teacher.urls"),
    Idle("teacher.divergence", "teacher.top_k", lambda c, _: c.teacher.top_k > 0, "teacher.top_k=64"),
    Idle(
        "advantage.whiten_batch reward.overlong_penalty reward.scale reward.running_std reward.clip",
        "advantage.kind",
        lambda c, _: c.advantage.reads_rewards,
        'an advantage.kind that reads rewards, such as "grpo"',
    ),
    Idle("advantage.lam", "advantage.kind", lambda c, _: c.advantage.kind == "gae", 'advantage.kind="gae"'),
    Idle("advantage.n_step", "advantage.kind", lambda c, _: c.advantage.kind == "n_step", 'advantage.kind="n_step"'),
    Idle(
        "data.source data.format data.fields data.subset data.split data.dataset data.options data.size",
        "data.sources",
        lambda c, _: not c.data.sources,
        "data.sources=[]",
    ),
    Idle(
        "data.path",
        "data.source data.sources",
        lambda c, _: c.data.needs_path or bool(c.data.sources),
        'data.source="jsonl"',
    ),
    Idle(
        "data.format data.fields",
        "data.source data.sources",
        lambda c, _: c.data.has_rows or bool(c.data.sources),
        'data.source="jsonl"',
    ),
    Idle("data.subset data.split", "data.source", lambda c, _: "split" in c.data.kind.reads, 'data.source="hub"'),
    Idle(
        "data.dataset",
        "data.source",
        lambda c, _: "dataset" in c.data.kind.reads,
        'data.source="reasoning_gym"',
    ),
    Idle(
        "data.options",
        "data.source",
        lambda c, _: not c.data.has_rows or c.data.is_own_function,
        "a procedural data.source, or your own function",
    ),
    Idle("data.size", "data.source", lambda c, _: not c.data.has_rows, "a procedural data.source"),
    Idle(
        "reward.kind reward.judges reward.weights reward.timeout_s reward.concurrency reward.allowed_calls",
        "environment.kind",
        lambda c, _: c.environment.kind in ("none", "tools", "agent"),
        'environment.kind="none", "tools" or "agent"',
        "an environment gives the rewards itself",
    ),
    Idle(
        "environment.*",
        "environment.kind",
        lambda c, _: c.environment.is_used,
        'environment.kind="calculator", "tools" or a function of your own',
    ),
    Idle(
        "environment.concurrency",
        "environment.kind",
        lambda c, _: not c.environment.is_agent,
        "a step function",
        "each sample has a program of its own, and rollout.groups_in_flight says how many there are",
    ),
    Idle(
        "reward.overlong_penalty reward.clip",
        "advantage.kind",
        lambda c, _: not c.advantage.reads_parts,
        'advantage.kind="grpo"',
        "gdpo reads the parts of a verdict, and not the reward that follows from them",
    ),
    Idle(
        "reward.overlong_buffer_tokens",
        "reward.overlong_penalty",
        lambda c, _: c.reward.overlong_penalty > 0,
        "reward.overlong_penalty=1",
    ),
    Idle("eval.*", "eval.interval_steps", lambda c, _: c.eval.interval_steps is not None, "eval.interval_steps=10"),
    Idle(
        "eval.path eval.num_prompts eval.samples_per_prompt eval.temperature eval.top_p eval.top_k",
        "eval.sets",
        lambda c, _: not c.eval.sets,
        "eval.sets=[]",
    ),
    Idle(
        "eval.path",
        "eval.interval_steps data.source",
        lambda c, _: c.eval.interval_steps is None or c.data.kind.path == "file",
        'data.source="jsonl"',
    ),
    Idle(
        "rollout.urls rollout.api_key",
        "rollout.engine",
        lambda _, engine: engine.needs == "urls",
        'rollout.engine="attach"',
    ),
    Idle(
        "rollout.recorded_from",
        "rollout.engine",
        lambda _, engine: engine.needs == "recordings",
        'rollout.engine="recorded"',
    ),
    Idle(
        "rollout.num_servers rollout.max_restarts rollout.engine_threads",
        "rollout.engine",
        lambda _, engine: engine.specs is not None,
        'an engine that the run starts, such as rollout.engine="embedded"',
    ),
    Idle("run.standby", "run.max_restarts", lambda c, _: c.run.max_restarts > 0, "run.max_restarts=3"),
    Idle(
        "sglang.extra",
        "rollout.engine",
        lambda _, engine: engine.section == "sglang",
        'rollout.engine="sglang"',
    ),
    Idle(
        "sync.bucket_mib",
        "sync.channel rollout.placement",
        lambda c, _: c.sync_channel == "broadcast" or c.shares_gpus,  # recipes set it, whatever the placement
        'sync.channel="broadcast"',
    ),
    Idle("lora.alpha lora.targets lora.init_from", "lora.rank", lambda c, _: c.lora.rank is not None, "lora.rank=16"),
    Idle("sync.folder", "sync.channel rollout.placement", lambda c, _: c.sync_channel == "disk", 'sync.channel="disk"'),
    Idle(
        "rollout.placement",
        "rollout.engine",
        lambda _, engine: engine.samples,  # attached servers are an error: checks/placement.py
        'an engine that the run starts, such as rollout.engine="sglang"',
    ),
    Idle(
        "checkpoint.keep_last checkpoint.asynchronous",
        "checkpoint.interval_steps",
        lambda c, _: c.checkpoint.interval_steps is not None,
        "checkpoint.interval_steps=20",
    ),
    Idle(
        "monitor.token_profile",
        "loss.name",
        lambda c, _: c.loss.clips,
        'a loss that clips, such as loss.name="bapo"',
    ),
    Idle(
        "cluster.gpus_per_node cluster.gpu_memory_gib",
        "cluster.gpu",
        lambda c, _: c.cluster.gpu is not None,
        'cluster.gpu="h100" or another kind',
    ),
)
"""A setting is reported by the first row that says it does not act."""


def idle_settings(run: Resolved, given: Collection[str] | None = None) -> Iterator[Violation]:
    """Find settings that differ from their defaults and have no effect.

    Args:
        given: settings and tables to consider; None means all. Shipped configurations are meant to be combined, so
            parts of one may have no effect together with another.
    """
    told: set[str] = set()
    for row in IDLE:
        if row.act(run.config, run.engine):
            continue
        changed = {
            name: value
            for name, value in _changed(run.config, row.settings)
            if name not in told and (given is None or name in given)
        }
        told |= changed.keys()
        if changed:
            settings = ", ".join(f"{name}={_shown(value)}" for name, value in changed.items())
            has, them = ("has", "it") if len(changed) == 1 else ("have", "them")
            reason = f" ({row.refused})" if row.refused else ""
            yield Violation(
                (*changed, *row.on.split()),
                f"{settings} {has} no effect without {row.needed}{reason}",
                f"set that, or leave {them} out",
                "error" if row.refused else "warning",
            )


def _changed(config: Config, settings: str) -> Iterator[tuple[str, Any]]:
    for name in settings.split():
        section_name, key = name.split(".")
        section = getattr(config, section_name)
        default = _default(section)
        keys = type(section).model_fields if key == "*" else [key]
        for each in keys:
            if each == "preset" or not hasattr(section, each):  # a loss without this setting
                continue
            if (value := getattr(section, each)) != getattr(default, each):
                yield f"{section_name}.{each}", value


def _default(section: BaseModel) -> BaseModel:
    """Return the section with its defaults. A preset is kept, because it selects them."""
    if isinstance(section, ClipBoundConfig):
        return ClipBoundConfig.model_validate({"preset": section.preset})
    return type(section).model_construct()


def _shown(value: Any) -> str:
    text = json.dumps(value.model_dump() if isinstance(value, BaseModel) else value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
