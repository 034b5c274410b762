"""An engine: the embedded server at the lowest priority, so that a laptop stays responsive."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bapo_megatron.config.engines import EngineKind
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.processes import EngineShare
from bapo_megatron.engines.start import embedded_specs
from bapo_megatron.engines.supervisor import EngineSpec

KIND = EngineKind("nice engine", specs="nice_engine:specs")


def specs(
    config: Config, model_path: Path, logs: Sequence[Path], ports: Sequence[int], share: EngineShare
) -> list[EngineSpec]:
    """Describe one server for each log and port: its URL, and the command that starts it."""
    embedded = embedded_specs(config, model_path, logs, ports, share)
    return [dataclasses.replace(spec, command=["nice", "-n", "19", *spec.command]) for spec in embedded]
