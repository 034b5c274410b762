"""A rollout engine: the embedded one, at a low priority, so that it yields the CPU to the trainer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config.engines import EngineKind
from bapo_megatron.engines.start import embedded_specs
from bapo_megatron.engines.supervisor import EngineSpec
from bapo_megatron.resolved import Resolved
from bapo_megatron.resolved.placement import NodeShare

KIND = EngineKind("nice embedded engine", specs="nice_engine:engine_specs")


def engine_specs(run: Resolved, logs: Sequence[Path], ports: Sequence[int], here: NodeShare) -> list[EngineSpec]:
    """Describe one server for each port: its URL, and the command that starts it."""
    specs = embedded_specs(run, logs, ports, here)
    return [replace(spec, command=["nice", "-n", "10", *spec.command]) for spec in specs]
