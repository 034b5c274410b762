"""A configuration from the command line, checked for this machine or for the cluster that it names."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.base import Violation
from bapo_megatron.config.load import read_config, split_arguments
from bapo_megatron.config.plan import check
from bapo_megatron.config.plan_slurm import check_placement, several_nodes
from bapo_megatron.config.precision import this_machine
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, UserError, escaped
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.preflight.inputs import Memory, read_inputs
from bapo_megatron.preflight.known import known_config
from bapo_megatron.preflight.plan import check_cluster
from bapo_megatron.runtime.environment import has_gpu_driver

_ENOUGH_GPUS = 1_000_000  # the number of ranks stays as it is


def load_checked(
    arguments: Sequence[str], *, elsewhere: bool = False, here: bool | None = None, memory: bool = True
) -> Config:
    """Load and check a configuration, print warnings, and raise ConfigError with every problem.

    Args:
        elsewhere, here, memory: see `violations_of`.
    """
    reading = read_config(*split_arguments(arguments))
    config, found = reading.config, [Violation(problem) for problem in reading.problems]
    if config.cluster.nodes > 1 and not elsewhere:
        found.append(several_nodes(config))
    else:
        told = violations_of(config, elsewhere=elsewhere, here=here, memory=memory, given=reading.given)
        found += [v for v in told if not any(name in v.message for name in reading.dropped)]
    for violation in found:
        if violation.severity == "warning":
            print(f"bapo: warning: {escaped(violation.message)}", file=sys.stderr)
    if errors := [v.message for v in found if v.severity == "error"]:
        raise ConfigError("\n".join(errors))
    return config


def violations_of(
    config: Config,
    *,
    elsewhere: bool,
    here: bool | None = None,
    memory: bool = True,
    given: Collection[str] | None = None,
    read: Memory | None = None,
) -> list[Violation]:
    """List every violation that can be found before the run starts.

    Args:
        elsewhere: check for the configuration's cluster, if it names one, instead of this machine, on which the run
            need not start.
        here: whether models and data must be on this machine; None: unless it is checked for a cluster.
        memory: whether exceeding the memory of the cluster's GPUs is a violation; if not, no data is read, either.
        given: see config/plan.py.
        read: findings about data and judge in earlier calls.
    """
    starts_here = not elsewhere
    elsewhere = elsewhere and config.cluster.gpu is not None
    here = not elsewhere if here is None else here
    found: list[Violation] = []
    known = known_config(config.model.path) if elsewhere and not here else None
    model = None if known else _model(config.model.path, "model.path", found)
    hf_config = known or _hf_config(model, found)
    critic = None if config.advantage.compares_responses else config.critic.path
    reference = config.loss.reference_path if config.loss.kl_coef else None
    others = {"critic.path": critic, "loss.reference_path": reference}
    hf_configs = {
        setting: (known and known_config(path)) or _hf_config(_model(path, setting, found), found)
        for setting, path in others.items()
        if path is not None
    }
    num_gpus = config.cluster.nodes * config.cluster.gpus_per_node if elsewhere else num_visible_gpus()
    found += check(
        config,
        hf_config=hf_config,
        reference_config=hf_configs.get("loss.reference_path"),
        num_gpus=num_gpus,
        starts_here=starts_here,
        machine=this_machine() if num_gpus and not elsewhere else None,
        given=given,
    )
    if any(v.message.startswith("rollout.engine=") for v in found):
        return found  # the other checks ask what the engine can do
    if config.cluster.nodes > 1:
        found += check_placement(config)
    if memory:
        found += read_inputs(config, model, {} if read is None else read, here=here)
    if not any(v.severity == "error" for v in found):  # memory needs a possible layout
        found += check_cluster(config, hf_config, memory=memory)
    return found


def accepts_layout(config: Config, hf_config: dict[str, Any], *, on_gpus: bool) -> bool:
    """Return whether `bapo check` accepts a changed layout of the same number of ranks, memory aside."""
    violations = check(config, hf_config=hf_config, num_gpus=_ENOUGH_GPUS if on_gpus else 0)
    if config.cluster.nodes > 1:
        violations += check_placement(config)
    return not any(v.severity == "error" for v in violations)


def _model(path: str, setting: str, found: list[Violation]) -> Path | None:
    """Return the folder of a model; add problems with it to `found`."""
    try:
        return resolve_model_path(path, setting=setting, weights=False)
    except UserError as error:
        found.append(Violation(str(error)))
        return None


def _hf_config(folder: Path | None, found: list[Violation]) -> dict[str, Any] | None:
    """Return the config.json of a model; add problems with it to `found`."""
    try:
        return None if folder is None else load_hf_config(folder)
    except UserError as error:
        found.append(Violation(str(error)))
        return None


def num_visible_gpus() -> int:
    """Count the GPUs of this machine that torch may use; without a driver, torch is not imported."""
    if not has_gpu_driver():
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
