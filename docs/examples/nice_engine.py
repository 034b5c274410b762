"""A rollout engine: the embedded one, at a low priority, so that it yields the CPU to the trainer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config.engines import EngineKind
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.processes import EngineShare
from bapo_megatron.engines.start import embedded_specs
from bapo_megatron.engines.supervisor import EngineSpec

KIND = EngineKind("nice embedded engine", specs="nice_engine:engine_specs")


def engine_specs(
    config: Config, model_path: Path, logs: Sequence[Path], ports: Sequence[int], share: EngineShare
) -> list[EngineSpec]:
    """Describe one server for each port: its URL, and the command that starts it."""
    specs = embedded_specs(config, model_path, logs, ports, share)
    return [replace(spec, command=["nice", "-n", "10", *spec.command]) for spec in specs]
