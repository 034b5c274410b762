"""Settings that were removed or renamed, and what to write instead."""

from collections.abc import Callable
from typing import Any

Path = tuple[str, ...]

_KEEP_GROUP = {"keep": "all", "drop": "informative"}

MOVED: dict[Path, Callable[[Any], str]] = {
    ("loss", "clip_higher"): lambda value: f'loss.name="grpo" with loss.clip_high={value}',
    ("rollout", "zero_variance"): lambda value: f'rollout.keep_group="{_KEEP_GROUP.get(value, "informative")}"',
}
"""What replaces the moved settings, given their values."""

_LEAVE_OUT = "leave it out"
_OPTION = "write it into slurm.options, such as slurm.options=%s"
_BF16_LAYERS = "write megatron.extra={first_last_layers_bf16=true, num_layers_at_%s_in_bf16=NUMBER}"
RETIRED: dict[str, tuple[Any, str]] = {
    "checkpoint.timeout_s": (1800.0, f"{_LEAVE_OUT}; a checkpoint has half an hour"),
    "cluster.network_gbit_per_s": (400.0, f"{_LEAVE_OUT}; plans are for 400 Gbit/s a GPU"),
    "critic.warmup_updates": (0, f"{_LEAVE_OUT}; critic.warmup_steps lets the critic learn before the policy"),
    "loss.kl_horizon": (10.0, f"{_LEAVE_OUT}; kl_coef changes by at most 2 % an update"),
    "optimizer.max_skipped_in_a_row": (20, f"{_LEAVE_OUT}; 20 skipped updates in a row end a run"),
    "precision.amax_history": (1024, _LEAVE_OUT),
    "precision.bf16_layers_at_start": (0, _BF16_LAYERS % "start"),
    "precision.bf16_layers_at_end": (0, _BF16_LAYERS % "end"),
    "precision.margin": (0, _LEAVE_OUT),
    "reward.code_memory_mib": (1024, f"{_LEAVE_OUT}; a program has 1 GiB of address space"),
    "rollout.engine_max_context": (
        "none",
        f"{_LEAVE_OUT}; the context is data.max_prompt_tokens + rollout.max_response_tokens",
    ),
    "rollout.router_url": ("none", f"{_LEAVE_OUT}; the run divides requests among rollout.urls itself"),
    "slurm.partition": ("none", _OPTION % '["--partition=NAME"]'),
    "slurm.account": ("none", _OPTION % '["--account=NAME"]'),
    "slurm.qos": ("none", _OPTION % '["--qos=NAME"]'),
    "slurm.cpus_per_rank": ("none", _OPTION % '["--cpus-per-task=NUMBER"]'),
    "slurm.requeue": (True, _OPTION % '["--no-requeue"]'),
    "slurm.exclusive": (False, _OPTION % '["--exclusive", "--mem=0"]'),
    "sync.backend": ("auto", f"{_LEAVE_OUT}; it follows from the engines, and sync.channel=disk needs none"),
    "monitor.grad_spike": (10.0, "set monitor.grad_norm_alarm, a separate limit, or leave it out"),
    "monitor.profile_ranks": ([0], f"{_LEAVE_OUT}; trainer rank 0 and each engine write a trace"),
    "monitor.prometheus_host": (
        "127.0.0.1",
        f"{_LEAVE_OUT}; to reach the endpoint from elsewhere, forward its port",
    ),
    "monitor.report": (True, f"{_LEAVE_OUT}; a run writes its report"),
    "monitor.stall_timeout_s": ("none", f"{_LEAVE_OUT}; it is half of parallel.timeout_s"),
    "monitor.straggler_ratio": (1.5, f"{_LEAVE_OUT}; the run warns of ranks that take 1.5 times the median"),
    "monitor.wandb_project": ("bapo-megatron", "set WANDB_PROJECT in the environment"),
    "monitor.wandb_entity": ("none", "set WANDB_ENTITY in the environment"),
    "monitor.wandb_mode": ("online", "set WANDB_MODE in the environment"),
}
"""Settings without a successor: the old default, which a file may still contain, and advice for other values."""
