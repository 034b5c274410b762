"""Settings of where a run computes: how the trainer is split, and the machines that it is meant for."""

import math
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from bapo_megatron.config.base import Section


class ParallelConfig(Section):
    """The split of the trainer over processes. ranks = tensor x pipeline x context x data."""

    tensor: PositiveInt = 1
    """Ranks that share each layer; must divide attention heads and key-value heads."""
    pipeline: PositiveInt = 1
    """Stages that the layers are cut into; must divide the number of layers."""
    virtual_pipeline: PositiveInt = 1
    """Chunks of layers on each stage, visited in turn: smaller bubbles, more messages. Above 1 it needs pipeline
    stages, and pipeline x virtual_pipeline must divide the number of layers."""
    context: PositiveInt = 1
    """Ranks that share each sequence, for long ones: attention gathers keys and values, all else stays split."""
    data: PositiveInt = 1
    """Copies of the model, each with a share of every mini-batch. Where it is left out and num_ranks is given:
    num_ranks / (tensor x pipeline x context)."""
    sequence: bool = False
    """Sequence parallelism inside the tensor-parallel group."""
    num_ranks: PositiveInt | None = None
    """Number of ranks that you mean to start; checked against the product."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of one trainer process. Unset: cores / ranks, at least 1."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one collective between trainer ranks."""

    @model_validator(mode="before")
    @classmethod
    def _fill_data(cls, value: Any) -> Any:
        """Derive `data` from num_ranks, so that a cluster's file need not know the split; plan.py checks the rest."""
        if not isinstance(value, dict) or "data" in value or not isinstance(value.get("num_ranks"), int):
            return value
        sizes = [value.get(name, 1) for name in ("tensor", "pipeline", "context")]
        if not all(type(size) is int and size > 0 for size in sizes):
            return value  # each of these has a check of its own
        data, rest = divmod(value["num_ranks"], math.prod(sizes))
        return value if rest or data < 1 else {**value, "data": data}


class ClusterConfig(Section):
    """The machines that a run is meant for. With a kind of GPU, `bapo check` plans for them instead of this machine:
    trainer ranks take the first GPUs, SGLang servers the next ones."""

    gpu: Literal["a100", "h100", "h200", "b200"] | None = None
    """Kind of GPU: A100 or H100 with 80 GB, H200 with 141 GB, B200 with 180 GB. Unset: this machine."""
    nodes: PositiveInt = 1
    """Machines."""
    gpus_per_node: PositiveInt = 8
    """GPUs of each machine, connected by NVLink."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of a GPU that a process can use. Unset: that of its kind."""
    network_gbit_per_s: PositiveFloat = 400.0
    """Network bandwidth of one GPU, between machines, in one direction."""
