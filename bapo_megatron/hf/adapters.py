"""LoRA's adapters as parameters of a model: y = W x + alpha / rank * B (A x), with A [rank, in] and B [out, rank].

A model with adapters trains them alone. Their tensors have PEFT's names without its prefix, such as
"model.layers.0.self_attn.q_proj.lora_A.weight"; each of q, k, v, o, gate, up and down has its own A.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from bapo_megatron.hf.families import COLUMNS, COPY, ROWS, Block, Parameter

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model. Example: Adapters(rank=8, alpha=16.0, targets=("q_proj", "v_proj")).scale == 2.0"""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def frozen(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(parameter, trained=False) for parameter in parameters)


def with_adapters(block: Block, targets: Collection[str]) -> Block:
    """Return a block whose parameters are frozen, with an A and a B for each of its linear layers in `targets`."""
    return replace(block, parameters=(*frozen(block.parameters), *_adapters(block, targets)))


def _adapters(block: Block, targets: Collection[str]) -> Iterator[Parameter]:
    """Yield adapters. Ranks split their longer side as they split the linear layer's weight, and hold copies of r.

    Example: of linear_qkv, {"self_attn.q_proj.weight": "QE"} has adapter.A.q_proj "RE" and adapter.B.q_proj "QR".
    """
    for linear in block.parameters:
        for tensor, dims in linear.tensors.items():
            name, _, kind = tensor.rpartition(".")
            target = name.rpartition(".")[2]
            if kind == "weight" and target in targets and "{}" not in tensor:
                module, is_row = linear.name.removesuffix(".weight"), linear.split == COLUMNS
                a, b = (COLUMNS, COPY) if is_row else (COPY, ROWS)
                yield Parameter(
                    f"{module}.adapter.A.{target}", a, {f"{name}.lora_A.weight": f"R{dims[1]}"}, stored=False
                )
                yield Parameter(
                    f"{module}.adapter.B.{target}", b, {f"{name}.lora_B.weight": f"{dims[0]}R"}, stored=False
                )
