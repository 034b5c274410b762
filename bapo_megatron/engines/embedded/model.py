"""Inference for dense Qwen2, Qwen3 and Llama checkpoints of Hugging Face: batched prefill and decode on a KV cache.

Shape legend (suffix of a tensor's name):
    B  rows (sequences)      T  new tokens per row     L  cached tokens per row     V  vocabulary
    E  hidden size           H  query heads            K  key-value heads           D  head dimension
    G  query heads per key-value head (H = K * G)      F  feed-forward size

The weights live in fused tensors (query-key-value, gate-up) for speed; `named_weights` are views into them under
Hugging Face names, so that loading and updating copy into place without any further step.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.reader import HFReader
from bapo_megatron.hf.rope import rotary_frequencies
from bapo_megatron.hf.shape import ModelShape, hf_tensors, load_hf_config, model_shape

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class KVCache:
    """Keys and values of up to `num_rows` sequences of up to `max_len` tokens: data[layer, k or v, B, K, L, D]."""

    def __init__(self, spec: ModelShape, *, num_rows: int, max_len: int, dtype: torch.dtype) -> None:
        shape = (spec.num_layers, 2, num_rows, spec.num_kv_heads, max_len, spec.head_dim)
        # Zeros, since masked positions are multiplied by 0 and a nan there would stay one. Mapped, not allocated: the
        # operating system hands out zeroed memory only where a row is written.
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.num_rows = num_rows
        self.max_len = max_len

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy one row over another, to keep the rows in use compact."""
        self.data[:, :, target, :, :num_tokens] = self.data[:, :, source, :, :num_tokens]


@dataclass(slots=True)
class _Layer:
    input_norm_E: Tensor
    qkv: Tensor  # [(H + 2K) * D, E]
    qkv_bias: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    out: Tensor  # [E, H * D]
    out_bias: Tensor | None
    post_norm_E: Tensor
    gate_up: Tensor  # [2F, E]
    gate_up_bias: Tensor | None
    down_EF: Tensor
    down_bias_E: Tensor | None


class Model:
    """One checkpoint, ready to sample from."""

    def __init__(self, spec: ModelShape, *, max_len: int, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self.named_weights: dict[str, Tensor] = {}
        self._embed_VE = self._add("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [self._add_layer(f"model.layers.{i}") for i in range(spec.num_layers)]
        self._norm_E = self._add("model.norm.weight", spec.hidden_size)
        tied = spec.tied_embeddings
        self._head_VE = self._embed_VE if tied else self._add("lm_head.weight", spec.vocab_size, spec.hidden_size)
        inv_freq, rope_scale = rotary_frequencies(spec)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
        self._cos_LD = (torch.cat((angles, angles), -1).cos() * rope_scale).to(dtype)
        self._sin_LD = (torch.cat((-angles, angles), -1).sin() * rope_scale).to(dtype)  # sign of rotate-half included

    @classmethod
    def from_pretrained(cls, path: str | Path, *, max_len: int, dtype: torch.dtype = torch.float32) -> Model:
        """Load a checkpoint folder (config.json, one safetensors file or a sharded set).

        Raises:
            CheckpointError: a missing file, an unsupported architecture, or weights that do not fit the config.
        """
        folder = Path(path)
        spec = model_shape(load_hf_config(folder), folder)
        if max_len > spec.max_positions:
            raise CheckpointError(
                f"{folder}: a context of {max_len} tokens is beyond the model's {spec.max_positions} positions"
            )
        model = cls(spec, max_len=max_len, dtype=dtype)
        with HFReader(folder) as read:
            read.check(spec)
            for name in hf_tensors(spec):
                model.named_weights[name].copy_(read(name))
        return model

    def new_cache(self, *, num_rows: int, max_len: int) -> KVCache:
        assert max_len <= self._cos_LD.shape[0], "the cache is longer than the rotary tables"
        return KVCache(self.spec, num_rows=num_rows, max_len=max_len, dtype=self.dtype)

    def check_weight(self, name: str, dtype: str, shape: Iterable[int]) -> None:
        """Raises CheckpointError unless a weight of this name, type and shape belongs to the model."""
        have = self.named_weights.get(name)
        if have is None:
            raise CheckpointError(f"the model has no weight {name!r}")
        if tuple(shape) != tuple(have.shape):
            raise CheckpointError(f"{name}: shape {tuple(shape)} was sent, the model has {tuple(have.shape)}")
        if dtype != _dtype_name(have.dtype):
            raise CheckpointError(f"{name}: dtype {dtype} was sent, the model has {_dtype_name(have.dtype)}")

    @torch.inference_mode()
    def prefill(self, token_ids_BT: Tensor, lengths_B: Tensor, cache: KVCache, first_row: int) -> Tensor:
        """Run right-padded sequences from position 0 into cache rows [first_row, first_row + B).

        Args:
            token_ids_BT: int64; what stands right of a row's length is ignored.
            lengths_B: int64, each at least 1.

        Returns: logits float32 [B, V] of the token after each sequence.
        """
        num_rows, num_tokens = token_ids_BT.shape
        rows = slice(first_row, first_row + num_rows)

        def attend(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
            k_BKTD, v_BKTD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
            cache.data[layer, 0, rows, :, :num_tokens] = k_BKTD
            cache.data[layer, 1, rows, :, :num_tokens] = v_BKTD
            # Padding is on the right, so the causal mask alone keeps real tokens from seeing it.
            out_BHTD = F.scaled_dot_product_attention(
                q_BTHD.transpose(1, 2), k_BKTD, v_BKTD, is_causal=True, enable_gqa=True
            )
            return out_BHTD.transpose(1, 2)

        cos_TD, sin_TD = self._cos_LD[:num_tokens], self._sin_LD[:num_tokens]
        hidden_BTE = self._blocks(token_ids_BT, cos_TD[None, :, None], sin_TD[None, :, None], attend)
        last_BE = hidden_BTE[torch.arange(num_rows), lengths_B - 1]
        return self._logits(last_BE)

    @torch.inference_mode()
    def decode(self, token_ids_B: Tensor, positions_B: Tensor, cache: KVCache) -> Tensor:
        """Append one token to each of the cache rows [0, B), at the given positions.

        Args:
            token_ids_B: int64.
            positions_B: int64, the number of tokens that each row holds already.

        Returns: logits float32 [B, V] of the token after it.
        """
        num_rows = token_ids_B.numel()
        length = int(positions_B.max()) + 1
        scale = self.spec.head_dim**-0.5
        row_index_B = torch.arange(num_rows)
        hidden_BL = torch.arange(length) > positions_B[:, None]
        mask_B11L = torch.zeros(num_rows, 1, 1, length, dtype=self.dtype)
        mask_B11L.masked_fill_(hidden_BL[:, None, None], float("-inf"))

        def attend(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
            keys, values = cache.data[layer, 0], cache.data[layer, 1]
            keys[row_index_B, :, positions_B] = k_BTKD[:, 0]
            values[row_index_B, :, positions_B] = v_BTKD[:, 0]
            # The query heads of one key-value head stand where a sequence of queries would: no copy of keys for GQA.
            q_BKGD = q_BTHD.view(num_rows, self.spec.num_kv_heads, -1, self.spec.head_dim)
            # Written out: on a CPU this takes half the time of the fused kernel, which is made for many queries a row.
            scores_BKGL = torch.matmul(q_BKGD * scale, keys[:num_rows, :, :length].transpose(-1, -2)) + mask_B11L
            out_BKGD = torch.matmul(scores_BKGL.softmax(-1), values[:num_rows, :, :length])
            return out_BKGD.reshape(num_rows, 1, self.spec.num_heads, self.spec.head_dim)

        cos_BD, sin_BD = self._cos_LD[positions_B], self._sin_LD[positions_B]
        hidden_B1E = self._blocks(token_ids_B[:, None], cos_BD[:, None, None], sin_BD[:, None, None], attend)
        return self._logits(hidden_B1E[:, 0])

    def _blocks(self, token_ids_BT: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """All transformer layers; cos and sin broadcast against [B, T, heads, D]."""
        spec = self.spec
        x_BTE = F.embedding(token_ids_BT, self._embed_VE)
        for index, layer in enumerate(self._layers):
            h_BTE = self._rms_norm(x_BTE, layer.input_norm_E)
            qkv = F.linear(h_BTE, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, spec.head_dim))
            q_BTHD, k_BTKD, v_BTKD = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=2)
            if layer.q_norm_D is not None and layer.k_norm_D is not None:
                q_BTHD = self._rms_norm(q_BTHD, layer.q_norm_D)
                k_BTKD = self._rms_norm(k_BTKD, layer.k_norm_D)
            out_BTHD = attend(index, _rotate(q_BTHD, cos, sin), _rotate(k_BTKD, cos, sin), v_BTKD)
            x_BTE = x_BTE + F.linear(out_BTHD.flatten(2), layer.out, layer.out_bias)
            h_BTE = self._rms_norm(x_BTE, layer.post_norm_E)
            gate_BTF, up_BTF = F.linear(h_BTE, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x_BTE = x_BTE + F.linear(F.silu(gate_BTF) * up_BTF, layer.down_EF, layer.down_bias_E)
        return x_BTE

    def _logits(self, hidden_BE: Tensor) -> Tensor:
        return F.linear(self._rms_norm(hidden_BE, self._norm_E), self._head_VE).float()

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """As Hugging Face computes it: the mean square in float32, the weight applied in the model's type."""
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        return weight * (x32 * scale).to(x.dtype)

    def _add(self, name: str, *shape: int) -> Tensor:
        self.named_weights[name] = torch.zeros(shape, dtype=self.dtype)
        return self.named_weights[name]

    def _add_fused(self, sizes: dict[str, int], *rest: int) -> Tensor:
        """One tensor whose slices along the first dimension are the named weights."""
        fused = torch.zeros((sum(sizes.values()), *rest), dtype=self.dtype)
        self.named_weights.update(zip(sizes, fused.split(list(sizes.values())), strict=True))
        return fused

    def _add_layer(self, prefix: str) -> _Layer:
        s = self.spec
        hidden, q_size, kv_size = s.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attn}.q_proj": q_size, f"{attn}.k_proj": kv_size, f"{attn}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": s.ffn_size, f"{mlp}.up_proj": s.ffn_size}
        return _Layer(
            input_norm_E=self._add(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._add_fused(_suffixed(qkv, "weight"), hidden),
            qkv_bias=self._add_fused(_suffixed(qkv, "bias")) if s.qkv_bias else None,
            q_norm_D=self._add(f"{attn}.q_norm.weight", s.head_dim) if s.qk_norm else None,
            k_norm_D=self._add(f"{attn}.k_norm.weight", s.head_dim) if s.qk_norm else None,
            out=self._add(f"{attn}.o_proj.weight", hidden, q_size),
            out_bias=self._add(f"{attn}.o_proj.bias", hidden) if s.out_bias else None,
            post_norm_E=self._add(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._add_fused(_suffixed(gate_up, "weight"), hidden),
            gate_up_bias=self._add_fused(_suffixed(gate_up, "bias")) if s.mlp_bias else None,
            down_EF=self._add(f"{mlp}.down_proj.weight", hidden, s.ffn_size),
            down_bias_E=self._add(f"{mlp}.down_proj.bias", hidden) if s.mlp_bias else None,
        )


def _suffixed(sizes: dict[str, int], suffix: str) -> dict[str, int]:
    return {f"{name}.{suffix}": size for name, size in sizes.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split layout; `sin` carries the sign of the first half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin
