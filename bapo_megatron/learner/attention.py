"""Causal attention over packed sequences, in plain torch or with Transformer Engine's kernels.

In plain torch, sequences of similar length form padded blocks, with one call of scaled_dot_product_attention per block.
The result is exact: padding follows a sequence's tokens, which a causal query never sees.

With context parallelism each rank holds two chunks of every sequence (`buffer.packing.context_tokens`). Each layer
gathers the keys and values of all ranks once, and a mask shows each chunk of queries the keys up to its own end. This
is exact and simple; the price is one layer's keys and values of the whole pack on each rank. Transformer Engine's
attention cuts "thd" packs in the same way, but passes keys around a ring.

Shape legend: T packed tokens of this rank, U tokens of the whole pack, N query heads, K key-value heads, D head
    dimension, S sequences of a block, Q and L the lengths of their longest queries and keys
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention  # cannot be built without the package
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn import Module

from bapo_megatron.learner.elementwise import WholeNorm, rotate
from bapo_megatron.learner.packs import HAS_GAPS, PackedSequences
from bapo_megatron.learner.parallel import device


def needs_repeated_heads(device_type: str, dtype: torch.dtype, is_masked: bool) -> bool:
    """Return whether torch's fused attention needs as many key-value heads as query heads.

    On a GPU, only its flash kernel shares them between query heads, and it takes neither float32 nor a mask. Its
    memory-efficient kernel takes both. Without repeated heads, torch would fall back to computing and keeping the
    weights of all pairs of tokens (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    return device_type == "cuda" and (dtype == torch.float32 or is_masked)


def attend(
    q_SNQD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    visible_S1QL: Tensor | None,
    scale: float | None,
    *,
    repeat_heads: bool,
) -> Tensor:
    """Return attention [S, N, Q, D]; without a mask it is causal.

    K divides N: each key-value head serves N / K query heads.

    Args:
        repeat_heads: copy keys and values for each query head, instead of letting the kernel share them.
    """
    if repeat_heads:
        copies = q_SNQD.shape[1] // k_SKLD.shape[1]
        k_SKLD, v_SKLD = (x.repeat_interleave(copies, dim=1) for x in (k_SKLD, v_SKLD))
    return F.scaled_dot_product_attention(
        q_SNQD,
        k_SKLD,
        v_SKLD,
        attn_mask=visible_S1QL,
        is_causal=visible_S1QL is None,
        scale=scale,
        enable_gqa=not repeat_heads,
    )


class CoreAttention(Module):
    rotates = True  # what Megatron has not rotated
    must_rotate = False  # whether only this module can

    def rotated(self, q_T1ND: Tensor, k_T1KD: Tensor, pack: PackedSequences) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, unless Megatron has done so or this layer does not rotate."""
        if pack.rotation is None or not self.rotates:
            return q_T1ND, k_T1KD
        return rotate(q_T1ND, pack.rotation), rotate(k_T1KD, pack.rotation)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: Megatron's checkpoints are not written."""
        return {}


class PackedAttention(CoreAttention):
    """Core attention for a Megatron layer spec, with the arguments of DotProductAttention and `PackedSequences`."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale  # None means 1 / sqrt(head dimension)

    def forward(
        self,
        q_T1ND: Tensor,
        k_T1KD: Tensor,
        v_T1KD: Tensor,
        *_: Any,
        packed_seq_params: PackedSequences,
        **__: Any,
    ) -> Tensor:
        """Return [T, 1, N * D]."""
        assert packed_seq_params.blocks is not None, "use PackedSequences.of"
        num_tokens = q_T1ND.shape[0]
        q_T1ND, k_T1KD = self.rotated(q_T1ND, k_T1KD, packed_seq_params)
        k_UKD, v_UKD = packed_seq_params.gather(k_T1KD, v_T1KD)
        out_TX = None
        for block in packed_seq_params.blocks:
            out_SNQD = attend(
                block.queries.pad(q_T1ND[:, 0]),
                block.keys.pad(k_UKD),
                block.keys.pad(v_UKD),
                block.visible_S1QL,
                self.scale,
                repeat_heads=needs_repeated_heads(q_T1ND.device.type, q_T1ND.dtype, block.visible_S1QL is not None),
            )
            part_TX = block.queries.unpad(out_SNQD, num_tokens)
            out_TX = part_TX if out_TX is None else out_TX + part_TX
        assert out_TX is not None, "a pack holds at least one token"
        return out_TX[:, None]


class TransformerEngineAttention(CoreAttention):
    """Transformer Engine's core attention, for bfloat16 on GPUs; needs `PackedSequences.for_transformer_engine`.

    It is wrapped because the pack stays "sbhd" outside of core attention (see `PackedSequences`).
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__()
        self.core = TEDotProductAttention(config=config, **kwargs)
        self.core.kept_packed_seq_params.add(HAS_GAPS)

    def forward(
        self,
        q_T1ND: Tensor,
        k_T1KD: Tensor,
        v_T1KD: Tensor,
        *args: Any,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> Tensor:
        """Return [T, 1, N * D]."""
        q_T1ND, k_T1KD = self.rotated(q_T1ND, k_T1KD, packed_seq_params)
        packed, pack = [x[:, 0] for x in (q_T1ND, k_T1KD, v_T1KD)], packed_seq_params.thd()
        if packed_seq_params.keys_U is None:
            out = self.core(*packed, *args, packed_seq_params=pack, **kwargs)
        else:
            queries, *others = packed
            gathered = (x.index_select(0, packed_seq_params.keys_U) for x in others)
            # Megatron's own forward reads these two, and has no name for the mask: a query sees all keys of its prompt.
            names = self.core.kept_packed_seq_params - {"cp_group", "local_cp_size"}
            described = {name: getattr(pack, name) for name in names}
            out = super(TEDotProductAttention, self.core).forward(
                queries, *gathered, None, attn_mask_type="padding_causal_bottom_right", **described
            )
        return out.reshape(q_T1ND.shape[0], 1, -1)


_SHARING_LIMIT = 0.05  # far above rounding in bfloat16, and far below what a wrong mask or a lost gradient gives


def sharing_problem(core: Module, describe: Callable[..., PackedSequences], config: TransformerConfig) -> str | None:
    """Return why `core` cannot compute a prompt once for two responses on this machine; None if it can.

    Two whole sequences, [prompt, a] and [prompt, b], must have the same outputs and gradients as [prompt, a, b], where
    a and b follow the prompt.

    Args:
        core: a layer's attention.
        describe: makes the packs that it reads.
    """
    prompt, a, b = 33, 17, 40
    tokens_T = torch.arange(prompt + a + b)
    copies_U = torch.cat([tokens_T[: prompt + a], tokens_T[:prompt], tokens_T[prompt + a :]]).to(device())
    kept_T = torch.cat([tokens_T[: prompt + a], tokens_T[prompt + a :] + prompt]).to(device())
    generator, tensor = torch.Generator().manual_seed(0), config.tensor_model_parallel_size
    num_heads = (config.num_attention_heads // tensor, *[config.num_query_groups // tensor] * 2)

    def drawn(num_heads: int) -> Tensor:
        values = torch.randn(len(tokens_T), 1, num_heads, config.kv_channels, generator=generator)
        return values.to(device(), config.params_dtype)

    inputs, weights_T1ND = [drawn(n).requires_grad_() for n in num_heads], drawn(num_heads[0])

    def found(rows: Tensor | None, lengths: tuple[int, ...], follows: Tensor | None) -> tuple[Tensor, ...]:
        cu_seqlens_S1 = torch.tensor([0, *lengths]).cumsum(0).int()
        pack = describe(cu_seqlens_S1, None, device(), follows)
        qkv = inputs if rows is None else [x.index_select(0, rows) for x in inputs]
        out_T1X = core(*qkv, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=pack)
        out_T1X = out_T1X if rows is None else out_T1X.index_select(0, kept_T)
        gradients = torch.autograd.grad(out_T1X, inputs, weights_T1ND.flatten(2))
        return out_T1X.detach(), *gradients

    try:
        shared = found(None, (prompt, a, b), torch.tensor([-1, 0, 0]))
        copied = found(copies_U, (prompt + a, prompt + b), None)
    except Exception as error:  # a kernel's library may refuse in its own way
        return f"it fails with {type(error).__name__}: {error}"
    distance = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(shared, copied, strict=True))
    if distance < _SHARING_LIMIT:
        return None
    return f"whole sequences give other results: the difference is {distance:.2g}"


def unrotated(core: type) -> type:
    """Return a class of core attention that rotates nothing."""
    return type(f"Unrotated{core.__name__}", (core,), {"rotates": False})


def with_whole_norms(core: type, num_heads: int, num_kv_heads: int) -> type:
    """Return a class of core attention that norms queries over all heads together, and keys, before it rotates them.

    Megatron's own place for norms (`q_layernorm`) takes norms of single heads alone: it sums their gradients over
    tensor-parallel ranks.
    """

    class Normed(core):
        must_rotate = True

        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self.q_norm, self.k_norm = WholeNorm(config, num_heads), WholeNorm(config, num_kv_heads)

        def forward(self, q_T1ND: Tensor, k_T1KD: Tensor, v_T1KD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = super().forward(self.q_norm(q_T1ND), self.k_norm(k_T1KD), v_T1KD, *args, **kwargs)
            return out

    Normed.__name__ = Normed.__qualname__ = f"Normed{core.__name__}"
    return Normed
