"""Settings that may change in a run that continues from a checkpoint, and what of the checkpoint cannot follow.

A resume takes changes of `RESUMABLE_SETTINGS` only. A branch, which is a new run, takes every change, except one that
would leave the weights behind. In the tables below, blanks separate the names of settings.
"""

from fnmatch import fnmatch
from typing import Literal

RESUMABLE_SETTINGS = """
    run.dir run.max_restarts run.standby
    cluster.*
    slurm.*
    checkpoint.*
    monitor.*
    sync.*
    train.num_steps train.max_tokens_per_microbatch train.share_prompts train.logprob_chunk_tokens
    train.logprob_backend train.recompute train.recompute_layers train.recompute_modules
    parallel.*
    optimizer.distributed
    data.on_bad_prompt
    reward.concurrency
    rollout.engine rollout.record rollout.recorded_from rollout.overlap rollout.abort_tail rollout.max_staleness
    rollout.urls rollout.api_key rollout.num_servers rollout.server_tensor_parallel rollout.max_concurrent_requests
    rollout.placement rollout.max_retries rollout.max_restarts rollout.engine_threads
    teacher.urls teacher.urls_by_source teacher.api_key
    sglang.*
    *timeout_s
"""
"""Settings that affect a run's length, speed or output, not its results."""

Part = Literal[
    "weights",
    "critic",
    "prompt position",
    "responses of the source",
    "untrained responses",
    "longer responses",
    "their rewards",
    "reward statistics",
    "bounds",
    "KL coefficient",
]
"""A part of a checkpoint that a change of settings may leave behind.

longer responses: untrained ones over a limit. their rewards: of untrained ones, which are judged again. bounds: the
table of earlier updates behind lagged or smoothed bounds.
"""

_SOURCE = """
    data.source data.path data.subset data.split data.format data.fields* data.dataset data.options* data.size
    data.sources*
"""
_JUDGE = "reward.kind reward.judges* reward.weights* reward.allowed_calls"
_LEFT: dict[Part, str] = {
    "weights": "model.path model.family lora.*",
    "critic": "critic.path",
    "prompt position": f"run.seed {_SOURCE}",
    "responses of the source": _SOURCE,
    "untrained responses": """
        model.replay_routes loss.center_top_k rollout.annotators teacher.hint
        data.chat_template data.system_prompt data.template_*
        environment.kind environment.options* environment.stop_tokens environment.max_*
        rollout.samples_per_prompt rollout.temperature rollout.top_p rollout.top_k rollout.ignore_stop_tokens
    """,
    "longer responses": "data.max_prompt_tokens rollout.max_response_tokens",
    "their rewards": _JUDGE,
    "reward statistics": f"{_JUDGE} reward.overlong_*",
    "bounds": """
        bapo.*
        loss.name loss.options* loss.search_bounds loss.proximal loss.importance_* loss.max_drift
    """,
    "KL coefficient": "loss.kl_coef loss.kl_estimator loss.reference_path",
}
_KEPT = """
    run.name run.deterministic
    model.dtype model.implementation
    precision.*
    reward.process_memory_mib reward.scale reward.running_std reward.clip
    environment.concurrency
    rollout.prompts_per_step rollout.truncated rollout.keep_group rollout.tokens_per_round rollout.groups_in_flight
    advantage.*
    loss.*
    optimizer.*
    critic.*
    teacher.*
    train.*
    eval.*
    megatron.*
"""
"""Settings that affect the steps to come and leave nothing of the checkpoint behind."""


def is_resumable(setting: str) -> bool:
    """Return whether a resume may change this setting."""
    return _matches(setting, RESUMABLE_SETTINGS)


def parts_left_by(setting: str) -> frozenset[Part]:
    """Return the parts of a checkpoint that cannot follow a change of this setting in a branch.

    Example: parts_left_by("run.seed") == {"prompt position"}, because the seed decides the order of prompts.
    """
    return frozenset(part for part, patterns in _LEFT.items() if _matches(setting, patterns))


def cost_of_change(setting: str) -> str:
    """Return in words how a run that has begun takes another value of a setting, and what the change leaves behind."""
    if is_resumable(setting):
        return "resume"
    left = parts_left_by(setting)
    assert left or _matches(setting, _KEPT), f"what does a change of {setting} leave behind?"
    if "weights" in left:
        return "new run"
    return "branch" + (f", without {' and '.join(sorted(left))}" if left else "")


def _matches(setting: str, patterns: str) -> bool:
    return any(fnmatch(setting, pattern) for pattern in patterns.split())
