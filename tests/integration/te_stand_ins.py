"""Transformer Engine's own Python code on a CPU: plain torch stands in for its compiled functions.

`unpack` makes a folder of the wheel `transformer-engine`, which is pure Python; `install` lets a new process import it,
before anything imports Megatron. A compiled function that has no stand-in here raises when it is called. The others
have the parameters of the compiled ones, refuse what a policy in bfloat16 never asks for, and note what they were asked
for in `CALLS`.

Shape legend: T packed tokens, N query heads, K key-value heads, D head dimension
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import warnings
import zipfile
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bapo_megatron_patches.megatron_core.cpu import cpu_torch
from torch import Tensor

from bapo_megatron.runtime.environment import trainer_variables

HOPPER = (9, 0)
_KERNELS_OF_OTHERS = ("onnx_extensions", "triton", "triton.pad", "triton.permutation", "triton.cross_entropy")


@dataclass(frozen=True)
class Call:
    """A call of a compiled function, with the facts that tests check."""

    name: str
    facts: dict[str, Any]


CALLS: list[Call] = []


def _note(name: str, **facts: Any) -> None:
    CALLS.append(Call(name, facts))


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the wheel into a new folder, whose Python takes tensors on the CPU for tensors on a GPU."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for file in folder.rglob("*.py"):
        file.write_text(file.read_text().replace(".is_cuda", ".is_cpu").replace(".cuda()", ".cpu()"))


def install(folder: Path) -> None:
    """Let this process import Transformer Engine from an unpacked wheel, and take the CPU for a Hopper GPU."""
    assert "megatron.core" not in sys.modules, "Megatron looks for Transformer Engine when it is imported"
    os.environ.update(trainer_variables({}))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # looks for no CUDA library
    sys.path.insert(0, str(folder))
    sys.modules["transformer_engine_torch"] = compiled = _compiled()
    for name in _KERNELS_OF_OTHERS:
        sys.modules[f"transformer_engine.pytorch.{name}"] = _Absent(name)
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = _Absent("einops")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the compiled part is missing
        common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None
    importlib.import_module("transformer_engine.pytorch")
    # it took all names of the compiled module by "import *"
    sys.modules["transformer_engine.pytorch.cpp_extensions"].__getattr__ = compiled.__getattr__  # type: ignore[method-assign]
    view = _view_of_torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]


def _view_of_torch() -> Any:
    """Return torch with the CPU as its CUDA device."""
    view = cpu_torch()
    chip = SimpleNamespace(major=HOPPER[0], minor=HOPPER[1], multi_processor_count=132, name="H100")
    view.cuda.__dict__.update(
        is_available=lambda: True,
        is_current_stream_capturing=lambda: False,
        get_device_properties=lambda *_: chip,
        get_device_capability=lambda *_: HOPPER,
        device=lambda *_: contextlib.nullcontext(),
    )
    view.__dict__["version"] = SimpleNamespace(cuda="13.0")
    return view


class _Absent(ModuleType):
    """A module, or anything in one, that can be imported and not called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Absent(f"{self.__name__}.{name}"))
        return self.__dict__[name]

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} was called, and has no stand-in")


class _Name(str):
    """A value of a compiled enumeration."""

    def __int__(self) -> int:
        return 0


class _Names(type):
    """A class that has each value it is asked for."""

    def __getattr__(cls, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name)


class FP8FwdTensors(IntEnum):
    """Places of a module's quantisers in the forward pass."""

    GEMM1_INPUT, GEMM1_WEIGHT, GEMM1_OUTPUT, GEMM2_INPUT, GEMM2_WEIGHT, GEMM2_OUTPUT = range(6)
    GEMM3_INPUT, GEMM3_WEIGHT, GEMM3_OUTPUT = range(6, 9)


class FP8BwdTensors(IntEnum):
    """Places of a module's quantisers in the backward pass."""

    GRAD_OUTPUT1, GRAD_INPUT1, GRAD_OUTPUT2, GRAD_INPUT2, GRAD_OUTPUT3, GRAD_INPUT3 = range(6)


_ENUMERATIONS = (
    *("DType", "CommOverlapType", "Float8BlockScaleTensorFormat", "NVTE_Fused_Attn_Backend", "NVTE_QKV_Layout"),
    *("NVTE_QKV_Format", "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_Softmax_Type"),
)
_DTYPES = {"kBFloat16": torch.bfloat16, "kFloat32": torch.float32}


def _compiled() -> ModuleType:
    module = _Absent("transformer_engine_torch")
    module.__dict__.update({name: _Names(name, (), {}) for name in _ENUMERATIONS})
    own = (FP8FwdTensors, FP8BwdTensors, generic_gemm, rmsnorm_fwd, rmsnorm_bwd, fused_rope_forward)
    own += (fused_rope_backward, get_fused_attn_backend, fused_attn_fwd, fused_attn_bwd, multi_tensor_adam)
    own += (multi_tensor_l2norm, multi_tensor_scale, get_cudnn_version, get_cublasLt_version)
    own += (te_general_grouped_gemm, get_num_cublas_streams)
    module.__dict__.update({one.__name__: one for one in own})
    return module


def get_cudnn_version() -> int:
    return 92400


def get_cublasLt_version() -> int:
    return 130100


def get_num_cublas_streams() -> int:
    return 4


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    D: Tensor | None,
    quantizer: None,
    output_dtype: _Name | None,
    bias: Tensor | None,
    bias_type: _Name,
    gelu: bool | None,
    gelu_in: None,
    grad: bool,
    workspace: Tensor,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: None,
    comm_type: None,
    extra_output: None,
    bulk_overlap: bool,
    alpha: float,
    beta: float,
) -> tuple[Tensor, Tensor | None, None, None]:
    """Return op(B) @ op(A) in rows, or write or add it to D; and the bias's gradient, the sum of B's rows.

    A linear's output is ("TN", its weight, its input), its input's gradient ("NN", weight, output's gradient), its
    weight's gradient ("NT", input, output's gradient).
    """
    assert A.dtype == B.dtype
    assert quantizer is comm_overlap is comm_type is extra_output is None
    assert not gelu  # None, as Megatron-Core 0.19.2 writes it, is False for the compiled function
    assert bulk_overlap is False
    assert (alpha, beta) == (1, int(accumulate))
    layout = "NT"[transa] + "NT"[transb]
    a, b = (x.reshape(-1, x.shape[-1]).float() for x in (A, B))
    out = (b.T if transb else b) @ (a.T if transa else a)
    _note("generic_gemm", layout=layout, into=None if D is None else D.dtype, accumulate=accumulate)
    bias_grad = None
    if bias is not None:
        assert bias.dtype == _DTYPES[bias_type]
        if grad:
            bias_grad = b.sum(0).to(bias.dtype)
        else:
            out += bias.float()
    if D is not None:
        result = D.add_(out) if accumulate else D.copy_(out)
    else:
        result = out.to(_DTYPES[output_dtype or "kBFloat16"])
        result = result if transb else result.view(*B.shape[:-1], -1)
    return result, bias_grad, None, None


def te_general_grouped_gemm(
    A: list[Tensor],
    transa: bool,
    B: list[Tensor],
    transb: bool,
    D: list[Tensor],
    D_type: _Name,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: _Name,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """Write or add each expert's product to its tensor of D, or to its rows of the only one; see `generic_gemm`."""
    targets = D[0].split(m_splits) if single_output else D
    for a, b, target in zip(A, B, targets, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        out = (b.float().T if transb else b.float()) @ (a.float().T if transa else a.float())
        if accumulate:
            target.add_(out)
        else:
            target.copy_(out)  # without rows, a weight's gradient is zero
    _note("grouped_gemm", layout="NT"[transa] + "NT"[transb], into=D[0].dtype, accumulate=accumulate)
    return bias


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: None,
    otype: _Name,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """Return the normed rows, no means, and each row's factor."""
    assert quantizer is None
    x, gamma = input.float(), weight.float() + zero_centered_gamma
    factor = torch.rsqrt(x.square().mean(-1) + eps)
    normed = (x * factor[:, None] * gamma).to(_DTYPES[otype])
    return normed if ln_out is None else ln_out.copy_(normed), None, factor


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weight."""
    grad, normed = dz.reshape(x.shape).float(), x.float() * rsigma[:, None]
    scaled = grad * (gamma.float() + zero_centered_gamma)
    of_x = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rsigma[:, None]
    return of_x.to(x.dtype), (grad * normed).sum(0).to(gamma.dtype)


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: None,
    qkv_format: _Name,
    interleaved: bool,
    cu_seqlens: None,
    cp_size: int,
    cp_rank: int,
    direction: int = 1,
) -> Tensor:
    """Rotate [T, 1, N, D] by float32 angles [T, 1, 1, R], each half of the first R dimensions with the other."""
    assert freqs.dtype == torch.float32
    assert freqs.shape[:-1] == (input.shape[0], 1, 1)
    assert start_positions is cu_seqlens is None
    assert (qkv_format, interleaved, cp_size, cp_rank) == ("NVTE_SBHD", False, 1, 0)
    _note("fused_rope")
    x, rest = input.tensor_split([freqs.shape[-1]], dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    turned = x.float() * freqs.cos() + direction * torch.cat((-second, first), dim=-1) * freqs.sin()
    return torch.cat((turned.to(input.dtype), rest), dim=-1)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: None,
    qkv_format: _Name,
    interleaved: bool,
    cu_seqlens: None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate back."""
    rest = (start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)
    return fused_rope_forward(output_grads, freqs, *rest, direction=-1)


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: _Name,
    kv_dtype: _Name,
    qkv_layout: _Name,
    bias_type: _Name,
    attn_mask_type: _Name,
    softmax_type: _Name,
    p_dropout: float,
    num_attn_heads: int,
    num_gqa_groups: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size_left: int,
    window_size_right: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> _Name:
    """Choose cuDNN's attention for sequences of any length, which takes 16-bit types and heads in multiples of 8."""
    fits = q_dtype == kv_dtype == "kBFloat16" and head_dim_qk == head_dim_v and head_dim_qk % 8 == 0
    return _Name("NVTE_F16_arbitrary_seqlen" if fits else "NVTE_No_Backend")


def _attend(q_TND: Tensor, k_UKD: Tensor, v_UKD: Tensor, cu_seqlens: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Attend by sequences; the last query of each sees all of its keys."""
    outputs, (lengths, key_lengths) = [], (one.diff().tolist() for one in cu_seqlens)
    parts = (q_TND.float().split(lengths), *(x.float().split(key_lengths) for x in (k_UKD, v_UKD)))
    for q, k, v in zip(*parts, strict=True):
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _check_attention(
    longest: tuple[int, int],
    settings: tuple[Any, ...],
    window: tuple[int, int],
    cu_seqlens: tuple[Tensor, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    absent: tuple[Any, ...],
) -> None:
    """Check what cuDNN needs of a pack, and that nothing more was asked for."""
    is_longer = not torch.equal(*cu_seqlens)
    mask = "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK" if is_longer else "NVTE_PADDING_CAUSAL_MASK"
    assert settings == (0, "NVTE_THD_THD_THD", "NVTE_NO_BIAS", mask, "NVTE_VANILLA_SOFTMAX")
    assert tuple(window) == (-1, 0)
    assert not any(x is not None for x in absent)
    q, k, _ = qkv
    assert {x.dtype for x in qkv} == {torch.bfloat16}
    for cu, x, bound in zip(cu_seqlens, (q, k), longest, strict=True):
        assert cu.dtype == torch.int32
        assert (int(cu[0]), int(cu[-1]), int(cu.diff().max())) == (0, x.shape[0], bound)


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: _Name,
    bias_type: _Name,
    attn_mask_type: _Name,
    softmax_type: _Name,
    window_size: tuple[int, int],
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor,
    cu_seqlens_kv_padded: Tensor,
    page_table_k: None,
    page_table_v: None,
    s_quantizer: None,
    o_quantizer: None,
    Bias: None,
    SoftmaxOffset: None,
    rng_gen: None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """Return causal attention [T, N, D] within each sequence of the pack, and what the backward pass would need."""
    settings = (p_dropout, qkv_layout, bias_type, attn_mask_type, softmax_type)
    absent = (page_table_k, page_table_v, s_quantizer, o_quantizer, Bias, SoftmaxOffset, rng_gen)
    longest, cu_seqlens = (max_seqlen_q, max_seqlen_kv), (cu_seqlens_q, cu_seqlens_kv)
    _check_attention(longest, settings, window_size, cu_seqlens, (Q, K, V), absent)
    assert return_max_logit is cuda_graph is False
    _note("fused_attn_fwd", training=is_training, has_more_keys=K.shape[0] > Q.shape[0])
    with torch.no_grad():
        out = _attend(Q, K, V, cu_seqlens, attn_scale).to(Q.dtype)
    return [out, Q.new_zeros(*Q.shape[:2], 1, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: _Name,
    bias_type: _Name,
    attn_mask_type: _Name,
    softmax_type: _Name,
    window_size: tuple[int, int],
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741
    dO: Tensor,
    fake_dtype: torch.dtype,
    dqkv_type: _Name,
    Aux_CTX_Tensors: list[Tensor],
    cu_seqlens_q_padded: Tensor,
    cu_seqlens_kv_padded: Tensor,
    s_quantizer: None,
    dp_quantizer: None,
    dqkv_quantizer: None,
    cuda_graph: bool,
) -> list[Tensor]:
    """Return the gradients of Q, K and V."""
    settings = (p_dropout, qkv_layout, bias_type, attn_mask_type, softmax_type)
    absent = (s_quantizer, dp_quantizer, dqkv_quantizer)
    longest, cu_seqlens = (max_seqlen_q, max_seqlen_kv), (cu_seqlens_q, cu_seqlens_kv)
    _check_attention(longest, settings, window_size, cu_seqlens, (Q, K, V), absent)
    _note("fused_attn_bwd", deterministic=deterministic)
    with torch.enable_grad():
        leaves = [x.detach().float().requires_grad_() for x in (Q, K, V)]
        out = _attend(*leaves, cu_seqlens, attn_scale)
        grads = torch.autograd.grad(out, leaves, dO.reshape(out.shape).float())
    return [grad.to(_DTYPES[dqkv_type]) for grad in grads]


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update float32 weights and moments in place; mode 1 is AdamW."""
    assert (mode, bias_correction) == (1, 1)
    _note("multi_tensor_adam", step=step)
    for gradient, weight, mean, square in zip(*tensor_lists, strict=True):
        assert {x.dtype for x in (gradient, weight, mean, square)} == {torch.float32}
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt() + epsilon
        weight.sub_(lr * (mean / (1 - beta1**step) / scale + weight_decay * weight))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = False
) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, [1]."""
    assert not per_tensor
    (tensors,) = tensor_lists
    _note("multi_tensor_l2norm", num_tensors=len(tensors))
    return torch.stack([x.float().norm() for x in tensors]).norm().view(1), None


def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    """Write the scaled tensors of the first list into the second."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
