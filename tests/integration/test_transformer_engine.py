"""The layers that Megatron builds from Transformer Engine's modules, with stand-ins for these, on CPUs.

The stand-ins have the names, arguments and results that Megatron-Core 0.16.1 relies on, and compute in plain torch.
This tests our side: names, layer norms inside linears, biases, attention over packs in the "thd" format.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from bapo_megatron.learner import attention, policy
from tests.distributed import run_distributed
from tests.hf_models import save_model
from tests.integration.hf_roundtrip import check_models_of_rank, check_saved, write_reference

built: list[str] = []


class Norm(torch.nn.RMSNorm):
    """te.pytorch.RMSNorm, as TENorm makes it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.offset = int(config.layernorm_zero_centered_gamma)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.offset + self.weight, self.eps)


class NormedColumnLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear, whose linear holds the norm's weight."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        config = kwargs["config"]
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        setattr(self.layer_norm_weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        built.append("linear")

    def forward(self, x: Tensor) -> Any:
        weight = int(self.config.layernorm_zero_centered_gamma) + self.layer_norm_weight
        normed = F.rms_norm(x, x.shape[-1:], weight, self.config.layernorm_epsilon)
        return super().forward(normed)


class Attention(torch.nn.Module):
    """TEDotProductAttention for a "thd" pack, one sequence after the other."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.kept_packed_seq_params = {field.name for field in dataclasses.fields(PackedSeqParams)}
        built.append("attention")

    def forward(
        self,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        attention_mask: None,
        attn_mask_type: Any,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert type(packed_seq_params) is PackedSeqParams, "TEDotProductAttention passes every field on"
        assert packed_seq_params.qkv_format == "thd"
        passed_on = {name: getattr(packed_seq_params, name) for name in self.kept_packed_seq_params}
        assert passed_on["pad_between_seqs"] is False, "otherwise Transformer Engine compares lengths on the GPU"
        lengths = packed_seq_params.cu_seqlens_q.diff()
        assert packed_seq_params.max_seqlen_q == packed_seq_params.max_seqlen_kv == int(lengths.max())
        outputs = []
        for q, k, v in zip(*(x.split(lengths.tolist()) for x in (q_TND, k_TKD, v_TKD)), strict=True):
            heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)


class Provider(LocalSpecProvider):
    """TESpecProvider for the stand-ins."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormedColumnLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return Attention


def check_with_stand_ins(rank: int, world_size: int, root: Path, names: list[str], layout: dict[str, Any]) -> None:
    gpt_layer_specs.TESpecProvider = Provider
    policy.TENorm = Norm
    attention.TEDotProductAttention = Attention
    policy.uses_transformer_engine = lambda *_: True  # type: ignore[assignment]
    check_models_of_rank(rank, world_size, root, names, layout, 1e-5)
    assert {"linear", "attention"} <= set(built)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one process"),
        pytest.param({"tensor": 2, "sequence": True}, id="two tensor ranks", marks=pytest.mark.slow),
    ],
)
def test_there_and_back_bit_for_bit_and_logits(layout: dict[str, Any], tmp_path: Path) -> None:
    names = ["llama-biases", "qwen2-tied-linear", "qwen3-tied-yarn", "gemma"]
    for name in names:
        write_reference(save_model(name, tmp_path / name, num_hidden_layers=2), tmp_path / name)
    run_distributed(check_with_stand_ins, layout.get("tensor", 1), tmp_path, names, layout)
    for name in names:
        check_saved(tmp_path / name)


def test_what_context_parallelism_asks_of_a_pack() -> None:
    """Padded lengths are given if the pack is split, as TransformerEngine's context_parallel.py asserts."""

    class Group:
        def size(self) -> int:
            return 2

    cu_seqlens_S1 = torch.tensor([0, 8, 20], dtype=torch.int32)
    for group in (None, Group()):
        pack = attention.PackedSequences.for_transformer_engine(cu_seqlens_S1, group)  # type: ignore[arg-type]
        thd = pack.thd()
        assert (pack.qkv_format, thd.qkv_format, thd.max_seqlen_q) == ("sbhd", "thd", 12)
        assert (thd.cu_seqlens_q_padded is cu_seqlens_S1) == (group is not None)
        assert thd.cp_group is None
