"""A configuration from the command line, checked for this machine or for the cluster that it names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import load_config, split_arguments
from bapo_megatron.config.plan import check
from bapo_megatron.config.plan_slurm import check_placement, refuse_several_nodes
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, UserError
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.learner.machine import this_machine
from bapo_megatron.preflight.known_models import known_config
from bapo_megatron.preflight.plan import check_cluster

_ENOUGH_GPUS = 1_000_000  # the number of ranks stays as it is


def load_checked(arguments: Sequence[str], *, elsewhere: bool = False, memory: bool = True) -> Config:
    """Load, check across sections, print warnings; raises ConfigError with every violation.

    Args:
        elsewhere: where the configuration names a cluster, check for that instead of this machine.
        memory: whether what does not fit into the cluster's GPUs is a violation.
    """
    config = load_config(*split_arguments(arguments))
    if not elsewhere:
        refuse_several_nodes(config)
    elsewhere = elsewhere and config.cluster.gpu is not None
    errors: list[str] = []
    known = known_config(config.model.path) if elsewhere else None
    hf_config = known or _hf_config(config.model.path, "model.path", errors)
    reference = config.loss.reference_path if config.loss.kl_coef else None
    reference_config = _hf_config(reference, "loss.reference_path", errors) if reference else None
    num_gpus = config.cluster.nodes * config.cluster.gpus_per_node if elsewhere else _num_gpus()
    violations = check(
        config,
        hf_config=hf_config,
        reference_config=reference_config,
        num_gpus=num_gpus,
        machine=this_machine() if num_gpus and not elsewhere else None,
    )
    errors += [v.message for v in violations if v.severity == "error"]
    if config.cluster.nodes > 1:
        errors += [v.message for v in check_placement(config) if v.severity == "error"]
    if not errors:
        errors += [v.message for v in check_cluster(config, hf_config, memory=memory)]
    for violation in violations:
        if violation.severity == "warning":
            print(f"bapo: warning: {violation.message}", file=sys.stderr)
    if errors:
        raise ConfigError("\n".join(errors))
    return config


def accepts_layout(config: Config, hf_config: dict[str, Any], *, on_gpus: bool) -> bool:
    """Whether `bapo check` finds no error in a changed layout of as many ranks, memory aside."""
    violations = check(config, hf_config=hf_config, num_gpus=_ENOUGH_GPUS if on_gpus else 0)
    if config.cluster.nodes > 1:
        violations += check_placement(config)
    return not any(v.severity == "error" for v in violations)


def _hf_config(path: str, setting: str, errors: list[str]) -> dict[str, Any] | None:
    """The config.json of a model; what is wrong with its folder goes to `errors`."""
    try:
        return load_hf_config(resolve_model_path(path, setting=setting))
    except UserError as error:
        errors.append(str(error))
        return None


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
