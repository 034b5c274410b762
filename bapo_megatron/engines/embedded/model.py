"""Inference for Hugging Face checkpoints of every supported family: batched prefill and decode on a cache.

Shape legend (suffix of a tensor's name):
    B  rows (sequences)      T  new tokens per row     L  cached tokens per row     V  vocabulary
    E  hidden size           H  query heads            K  key-value heads           D  head dimension
    G  query heads per key-value head (H = K * G)      N  tokens of all rows        R  rotated dimensions of a head

Weights have the trainer's names (`hf/families/`). Query-key-value and gate-up are one tensor each, for speed.
`named_weights` are views into them under Hugging Face names: copying into a view loads or updates its weight.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bapo_megatron.config.dotted import imported
from bapo_megatron.engines.embedded.layers import LayerPass, rms_norm
from bapo_megatron.engines.embedded.stream_rows import FedRows, Streams
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import EMBEDDING, FINAL_NORM, OUTPUT, Family
from bapo_megatron.hf.reader import HFReader
from bapo_megatron.hf.shape import ModelShape, entries, rotary_frequencies
from bapo_megatron.hf.splits import Entry, is_stored

_TOGETHER = 256  # tokens scored at a time, because log-probs of the whole vocabulary take memory

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Cache:
    """What up to `num_rows` sequences of up to `max_len` tokens left in the layers.

    Keys and values of full attention: data[layer, k or v, B, K, L, D]. Of linear attention the last inputs of the
    convolution, [layer, B, channels, width - 1], and the delta rule's state, float32 [layer, B, heads, key, value].
    Layers are counted within their kind.
    """

    def __init__(self, spec: ModelShape, *, num_rows: int, max_len: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows
        self.max_len = max_len
        self._memory: list[mmap.mmap] = []

        def allocate(shape: tuple[int, ...], dtype: torch.dtype = dtype) -> Tensor:
            # Zeros, because masked positions are multiplied by 0, and 0 times nan is nan.
            tensor, memory = _mapped_zeros(shape, dtype)
            self._memory.append(memory)
            return tensor

        num_linear = sum(layer.linear is not None for layer in spec.layers)
        num_full = spec.num_layers - num_linear
        self.data = allocate((num_full, 2, num_rows, spec.num_kv_heads, max_len, spec.head_dim))
        self.linear: tuple[Tensor, ...] = ()  # inputs and states
        if (sizes := spec.linear) is not None:
            inputs = (num_linear, num_rows, sizes.conv_channels, sizes.conv_width - 1)
            states = (num_linear, num_rows, sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
            self.linear = (allocate(inputs), allocate(states, torch.float32))

    def release(self) -> None:
        """Return the memory to the operating system; all entries are zero from now on."""
        for memory in self._memory:
            memory.madvise(mmap.MADV_DONTNEED)

    def arrange(self, targets: Sequence[int], sources: Sequence[int], num_tokens: int) -> None:
        """Copy rows over others simultaneously; a row may be both a source and a target.

        Args:
            num_tokens: tokens whose keys and values to copy. States are of all tokens that a row holds.
        """
        self.data[:, :, list(targets), :, :num_tokens] = self.data[:, :, list(sources), :, :num_tokens]
        for tensor in self.linear:
            tensor[:, list(targets)] = tensor[:, list(sources)]

    def clear(self, row: int) -> None:
        """Set all entries of a row to zero."""
        self.data[:, :, row] = 0
        for tensor in self.linear:
            tensor[:, row] = 0

    def states(self, rows: slice) -> tuple[Tensor, ...]:
        """Return views of the inputs and states of some rows; nothing if there is no linear attention."""
        return tuple(tensor[:, rows] for tensor in self.linear)


class Model:
    """One checkpoint, ready to sample from."""

    def __init__(self, spec: ModelShape, *, max_len: int, dtype: torch.dtype, streams: Streams | None = None) -> None:
        self.spec, self._scale = spec, spec.attention_scale
        self.streams = streams or {}
        self.dtype = dtype
        self.named_weights: dict[str, Tensor] = {}
        self._memory: list[mmap.mmap] = []  # memory of the weights
        self._layers: list[dict[str, Tensor]] = [{} for _ in range(spec.num_layers)]  # by name within the layer
        self._weights: dict[str, Tensor] = {}  # outside the layers
        for entry in filter(is_stored, entries(spec)):
            weight = self._allocate(entry)
            if entry.layer is None:
                self._weights[entry.megatron_name] = weight
            else:
                self._layers[entry.layer][entry.megatron_name.split(".", 3)[3]] = weight
        self._embed_VE = self._weights[EMBEDDING.name]
        self._head_VE = self._weights.get(OUTPUT.name, self._embed_VE)
        self._computed = [imported(layer.block.engine) for layer in spec.layers]
        kinds = [layer.linear is not None for layer in spec.layers]
        self._places = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]  # layer -> number in the cache
        inv_freq, rope_scale = rotary_frequencies(spec)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
        self._cos_LR = (torch.cat((angles, angles), -1).cos() * rope_scale).to(dtype)
        self._sin_LR = (torch.cat((-angles, angles), -1).sin() * rope_scale).to(dtype)  # includes rotate-half's sign

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, max_len: int, dtype: torch.dtype = torch.float32, own: Family | None = None
    ) -> Model:
        """Load a checkpoint folder (config.json, one safetensors file or a sharded set).

        Args:
            own: see `model_shape`.

        Raises:
            CheckpointError: a file is missing, the family is not supported, or the weights do not fit config.json.
        """
        folder, facts = Path(path), ModelFacts.of(path, own)
        spec = facts.shape
        if max_len > spec.max_positions:
            raise CheckpointError(
                f"{folder}: a context of {max_len} tokens exceeds the model's {spec.max_positions} positions"
            )
        model = cls(spec, max_len=max_len, dtype=dtype, streams=facts.streams)
        with HFReader(folder) as read:
            read.check(spec)
            for name, weight in model.named_weights.items():
                weight.copy_(read(name))
        return model

    def new_cache(self, *, num_rows: int, max_len: int) -> Cache:
        """Return an empty cache of at most the model's `max_len`."""
        assert max_len <= self._cos_LR.shape[0], "the cache is longer than the rotary tables"
        return Cache(self.spec, num_rows=num_rows, max_len=max_len, dtype=self.dtype)

    def check_weight(self, spec: TensorSpec) -> None:
        """Check that the model has a weight of this name, type and shape. Raises CheckpointError if not."""
        weight = self.named_weights.get(spec.name)
        held = "no weight of this name" if weight is None else TensorSpec.of(spec.name, weight)
        if held != spec:
            raise CheckpointError(f"{spec} was sent, but the model has {held}")

    @torch.inference_mode()
    def prefill(
        self, token_ids_BT: Tensor, lengths_B: Tensor, cache: Cache, first_row: int, fed: FedRows | None = None
    ) -> Tensor:
        """Run right-padded sequences from position 0 into cache rows [first_row, first_row + B).

        Args:
            token_ids_BT: int64; tokens beyond a row's length are ignored.
            lengths_B: int64, each at least 1.
            fed: computes the streams' rows for these tokens.

        Returns: logits float32 [B, V] for the token after each sequence.
        """
        num_rows, num_tokens = token_ids_BT.shape
        rows = slice(first_row, first_row + num_rows)

        def attend(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
            k_BKTD, v_BKTD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
            cache.data[layer, 0, rows, :, :num_tokens] = k_BKTD
            cache.data[layer, 1, rows, :, :num_tokens] = v_BKTD
            # Padding is on the right, so the causal mask alone hides it from real tokens.
            out_BHTD = F.scaled_dot_product_attention(
                q_BTHD.transpose(1, 2), k_BKTD, v_BKTD, is_causal=True, scale=self._scale, enable_gqa=True
            )
            return out_BHTD.transpose(1, 2)

        cos_TR, sin_TR = self._cos_LR[:num_tokens], self._sin_LR[:num_tokens]
        states = cache.states(rows)
        for tensor in states:
            tensor.zero_()
        angles = cos_TR[None, :, None], sin_TR[None, :, None]
        hidden_BTE = self._blocks(token_ids_BT, angles, attend, states, lengths_B, fed)
        last_BE = hidden_BTE[torch.arange(num_rows), lengths_B - 1]
        return self._logits(last_BE)

    @torch.inference_mode()
    def append(
        self,
        token_ids_BT: Tensor,
        lengths_B: Tensor,
        starts_B: Tensor,
        cache: Cache,
        first_row: int,
        fed: FedRows | None = None,
    ) -> Tensor:
        """Run right-padded tokens behind what cache rows [first_row, first_row + B) hold.

        Args:
            token_ids_BT: int64; tokens beyond a row's length are ignored.
            lengths_B: int64, each at least 1; a row and its length leave at least one place free.
            starts_B: int64, the number of tokens that each row already holds.
            fed: computes the streams' rows for these tokens.

        Returns: logits float32 [B, V] for the token after each row.
        """
        num_rows, num_tokens = token_ids_BT.shape
        rows = slice(first_row, first_row + num_rows)
        rows_B1 = torch.arange(rows.start, rows.stop)[:, None]
        # Padding may reach beyond the cache, but not the last place, which no token needs.
        positions_BT = (starts_B[:, None] + torch.arange(num_tokens)).clamp(max=cache.max_len - 1)
        length = int(positions_BT.max()) + 1
        is_seen_B1TL = (torch.arange(length) <= positions_BT[..., None])[:, None]

        def attend(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
            keys, values = cache.data[layer, 0], cache.data[layer, 1]
            keys[rows_B1, :, positions_BT] = k_BTKD
            values[rows_B1, :, positions_BT] = v_BTKD
            k_BKLD, v_BKLD = keys[rows, :, :length], values[rows, :, :length]
            out_BHTD = F.scaled_dot_product_attention(
                q_BTHD.transpose(1, 2),
                k_BKLD,
                v_BKLD,
                attn_mask=is_seen_B1TL,
                scale=self._scale,
                enable_gqa=True,
            )
            return out_BHTD.transpose(1, 2)

        cos_BTR, sin_BTR = self._cos_LR[positions_BT], self._sin_LR[positions_BT]
        angles = cos_BTR[:, :, None], sin_BTR[:, :, None]
        hidden_BTE = self._blocks(token_ids_BT, angles, attend, cache.states(rows), lengths_B, fed)
        return self._logits(hidden_BTE[torch.arange(num_rows), lengths_B - 1])

    @torch.inference_mode()
    def decode(self, token_ids_B: Tensor, positions_B: Tensor, cache: Cache, fed: FedRows | None = None) -> Tensor:
        """Append one token to each of the cache rows [0, B), at the given positions.

        Args:
            token_ids_B: int64.
            positions_B: int64, the number of tokens that each row already holds.
            fed: computes the streams' rows for these tokens.

        Returns: logits float32 [B, V] for the token after the appended one.
        """
        num_rows = token_ids_B.numel()
        length = int(positions_B.max()) + 1
        scale = self.spec.head_dim**-0.5 if self._scale is None else self._scale
        row_index_B = torch.arange(num_rows)
        hidden_BL = torch.arange(length) > positions_B[:, None]
        mask_B11L = torch.zeros(num_rows, 1, 1, length, dtype=self.dtype)
        mask_B11L.masked_fill_(hidden_BL[:, None, None], float("-inf"))

        def attend(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
            keys, values = cache.data[layer, 0], cache.data[layer, 1]
            keys[row_index_B, :, positions_B] = k_BTKD[:, 0]
            values[row_index_B, :, positions_B] = v_BTKD[:, 0]
            # The query heads of one key-value head form a sequence of queries: GQA without copying keys.
            q_BKGD = q_BTHD.view(num_rows, self.spec.num_kv_heads, -1, self.spec.head_dim)
            # Written out: on a CPU this takes half the time of the fused kernel, made for many queries per row.
            scores_BKGL = torch.matmul(q_BKGD * scale, keys[:num_rows, :, :length].transpose(-1, -2)) + mask_B11L
            out_BKGD = torch.matmul(scores_BKGL.softmax(-1), values[:num_rows, :, :length])
            return out_BKGD.reshape(num_rows, 1, self.spec.num_heads, self.spec.head_dim)

        cos_BR, sin_BR = self._cos_LR[positions_B], self._sin_LR[positions_B]
        angles, states = (cos_BR[:, None, None], sin_BR[:, None, None]), cache.states(slice(0, num_rows))
        hidden_B1E = self._blocks(token_ids_B[:, None], angles, attend, states, None, fed)
        return self._logits(hidden_B1E[:, 0])

    @torch.inference_mode()
    def score(self, token_ids_T: Tensor, first: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Score the tokens from index `first` (at least 1) on, without a cache: N = T - first.

        Returns: their log-probs float32 [N], and the `top_k` likeliest tokens there: ids int32 and log-probs
        float32 [N, top_k].
        """
        num_tokens = len(token_ids_T)

        def attend(layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
            q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
            out_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=self._scale, enable_gqa=True
            )
            return out_BHTD.transpose(1, 2)

        cos_TR, sin_TR = self._cos_LR[:num_tokens], self._sin_LR[:num_tokens]
        angles = cos_TR[None, :, None], sin_TR[None, :, None]
        states = Cache(self.spec, num_rows=1, max_len=0, dtype=self.dtype).states(slice(0, 1))
        hidden_BTE = self._blocks(token_ids_T[None], angles, attend, states, None, None)
        parts = []
        places = zip(hidden_BTE[0, first - 1 : -1].split(_TOGETHER), token_ids_T[first:].split(_TOGETHER), strict=True)
        for rows_NE, ids_N in places:
            logprobs_NV = torch.log_softmax(self._logits(rows_NE), -1)
            top_NK = logprobs_NV.topk(top_k, -1)
            parts.append((logprobs_NV.gather(1, ids_N[:, None])[:, 0], top_NK.indices.int(), top_NK.values))
        logprobs, top_ids, top_logprobs = (torch.cat(list(part)) for part in zip(*parts, strict=True))
        return logprobs, top_ids, top_logprobs

    def release(self) -> None:
        """Return the memory of all weights to the operating system; they are zero from now on."""
        for memory in self._memory:
            memory.madvise(mmap.MADV_DONTNEED)

    def _blocks(
        self,
        token_ids_BT: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        states: Sequence[Tensor],
        lengths_B: Tensor | None,
        fed: FedRows | None,
    ) -> Tensor:
        """Run all transformer layers.

        Args:
            angles: cosine and sine, which broadcast against [B, T, heads, R].
            states: inputs and states of the rows, as `Cache.states` returns them; changed in place.
            lengths_B: tokens of each row that are not padding, if some are.
        """
        spec = self.spec
        x_BTE = F.embedding(token_ids_BT, self._embed_VE)
        if spec.embedding_scale != 1:
            x_BTE = x_BTE * x_BTE.new_tensor(spec.embedding_scale)
        for index, (shape, place, layer) in enumerate(zip(spec.layers, self._places, self._layers, strict=True)):
            of_layer = [] if shape.linear is None else [tensor[place] for tensor in states]
            see = None if fed is None else partial(fed.see_layer, index)
            one = LayerPass(spec, shape, layer, angles, partial(attend, place), of_layer, lengths_B, see)
            x_BTE = self._computed[index](x_BTE, one)
        if fed is not None:
            fed.see_end(x_BTE)
        return x_BTE

    def _logits(self, hidden_BE: Tensor) -> Tensor:
        logits_BV = F.linear(rms_norm(hidden_BE, self._weights[FINAL_NORM.name], self.spec), self._head_VE).float()
        return logits_BV if self.spec.logits_scale == 1 else logits_BV / self.spec.logits_scale

    def _allocate(self, entry: Entry) -> Tensor:
        """Allocate one parameter; slices along its first dimension are the named weights."""
        rows = [shape[0] for shape in entry.hf_shapes]
        weight, memory = _mapped_zeros((sum(rows), *entry.hf_shapes[0][1:]), self.dtype)
        self._memory.append(memory)
        self.named_weights.update(zip(entry.hf_names, weight.split(rows), strict=True))
        return weight


def _mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Return zeros and their memory, mapped so that the system provides only written pages and can take them back."""
    size = math.prod(shape)
    num_bytes = max(size, 1) * dtype.itemsize  # nothing of size 0 can be mapped
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)[:size].view(shape), memory
