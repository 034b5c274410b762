"""An engine in other arithmetic than its trainer's: weights arrive in float32, and are rounded to compute in bfloat16.

bapo train moe_demo rollout.engine=studies.bfloat16:KIND        in a checkout's root
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.config.engines import EngineKind
from bapo_megatron.engines.embedded import server
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.stream_rows import Streams
from bapo_megatron.engines.start import embedded_specs
from bapo_megatron.engines.supervisor import EngineSpec
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.resolved import Resolved
from bapo_megatron.resolved.placement import NodeShare

KIND = EngineKind("bfloat16 engine", specs="studies.bfloat16:engine_specs", cuts=True)


class RoundedModel(Model):
    """The embedded engine's model in bfloat16, whose named weights are in the trainer's float32."""

    def __init__(self, spec: ModelShape, *, max_len: int, dtype: torch.dtype, streams: Streams | None = None) -> None:
        super().__init__(spec, max_len=max_len, dtype=torch.bfloat16, streams=streams)
        self._rounded = self.named_weights
        self.named_weights = {name: torch.zeros_like(w, dtype=dtype) for name, w in self._rounded.items()}

    def _blocks(self, *args: Any, **kwargs: Any) -> Tensor:
        for name, weight in self.named_weights.items():  # before each pass, which takes longer even in a small model
            self._rounded[name].copy_(weight)
        return super()._blocks(*args, **kwargs)


def engine_specs(run: Resolved, logs: Sequence[Path], ports: Sequence[int], here: NodeShare) -> list[EngineSpec]:
    """Describe the embedded engines, with this module in their place."""
    specs = embedded_specs(run, logs, ports, here)
    package = server.__package__
    checkout = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])]))
    return [
        replace(
            spec,
            command=[__name__ if part == package else part for part in spec.command],
            environment={**spec.environment, "PYTHONPATH": checkout},  # the folder with studies/ is not installed
        )
        for spec in specs
    ]


def main(argv: list[str] | None = None) -> None:
    """Serve, with the arguments of the embedded engine."""
    server.main(argv, model_type=RoundedModel)


if __name__ == "__main__":
    main()
