"""A configuration from the command line, checked for this machine or for the cluster that it names."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.base import Violation
from bapo_megatron.config.dotted import REWARD
from bapo_megatron.config.load import load_config, split_arguments
from bapo_megatron.config.plan import check
from bapo_megatron.config.plan_slurm import check_placement, refuse_several_nodes
from bapo_megatron.config.precision import this_machine
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.preflight.known import known_config
from bapo_megatron.preflight.plan import check_cluster

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of the drivers: NVIDIA's, the one of WSL, AMD's
_ENOUGH_GPUS = 1_000_000  # the number of ranks stays as it is


def load_checked(arguments: Sequence[str], *, elsewhere: bool = False, memory: bool = True) -> Config:
    """Load and check a configuration, print warnings, and raise ConfigError with every violation.

    Args:
        elsewhere, memory: see `violations_of`.
    """
    config = load_config(*split_arguments(arguments))
    if not elsewhere:
        refuse_several_nodes(config)
    found = violations_of(config, elsewhere=elsewhere, memory=memory)
    for violation in found:
        if violation.severity == "warning":
            print(f"bapo: warning: {violation.message}", file=sys.stderr)
    if errors := [v.message for v in found if v.severity == "error"]:
        raise ConfigError("\n".join(errors))
    return config


def violations_of(config: Config, *, elsewhere: bool, memory: bool = True) -> list[Violation]:
    """List every violation that can be found before the run starts.

    Args:
        elsewhere: check for the configuration's cluster, if it names one, instead of this machine.
        memory: whether exceeding the memory of the cluster's GPUs is a violation.
    """
    elsewhere = elsewhere and config.cluster.gpu is not None
    found = list(_judge(config))
    known = known_config(config.model.path) if elsewhere else None
    hf_config = known or _hf_config(config.model.path, "model.path", found)
    reference = config.loss.reference_path if config.loss.kl_coef else None
    reference_config = _hf_config(reference, "loss.reference_path", found) if reference else None
    num_gpus = config.cluster.nodes * config.cluster.gpus_per_node if elsewhere else num_visible_gpus()
    found += check(
        config,
        hf_config=hf_config,
        reference_config=reference_config,
        num_gpus=num_gpus,
        machine=this_machine() if num_gpus and not elsewhere else None,
    )
    if config.cluster.nodes > 1:
        found += check_placement(config)
    if not any(v.severity == "error" for v in found):  # memory needs a possible layout
        found += check_cluster(config, hf_config, memory=memory)
    return found


def accepts_layout(config: Config, hf_config: dict[str, Any], *, on_gpus: bool) -> bool:
    """Return whether `bapo check` accepts a changed layout of the same number of ranks, memory aside."""
    violations = check(config, hf_config=hf_config, num_gpus=_ENOUGH_GPUS if on_gpus else 0)
    if config.cluster.nodes > 1:
        violations += check_placement(config)
    return not any(v.severity == "error" for v in violations)


def _judge(config: Config) -> Iterator[Violation]:
    """Load a judge at a dotted path in its own process, as a run does."""
    if config.reward.kind not in REWARD.names:
        from bapo_megatron.rewards.scorer import RewardScorer  # imports torch

        try:
            RewardScorer(config).close()
        except UserError as error:
            yield Violation(str(error))


def _hf_config(path: str, setting: str, found: list[Violation]) -> dict[str, Any] | None:
    """Return the config.json of a model; add problems with its folder to `found`."""
    try:
        return load_hf_config(resolve_model_path(path, setting=setting, weights=False))
    except UserError as error:
        found.append(Violation(str(error)))
        return None


def num_visible_gpus() -> int:
    """Count the GPUs of this machine that torch may use; without a driver, torch is not imported."""
    if not any(os.path.exists(device) for device in _GPU_DEVICES):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
