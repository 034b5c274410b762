"""SGLang 0.5.23 on a machine without CUDA, and on a GPU without its compiled kernels.

Without CUDA
------------

Why: SGLang imports GPU-only packages at the top of modules that a CPU server loads too, although it never calls them
there: `triton` (kernels/ops/sampling/murmur_hash.py and hundreds more, as decorators and annotations), `torchvision`
(srt/multimodal/processors/qwen_vl.py and its neighbours, which are all imported to be registered) and `sgl_kernel`
(srt/layers/activation.py and others). With `--attention-backend torch_native --sampling-backend pytorch` the
arithmetic of a text model is plain PyTorch.

How: a finder at the end of `sys.meta_path`, so after every real package, answers imports of the packages in `STUBS`
with modules whose names can be imported, called as decorators, subclassed and subscripted, and do nothing else. The
few functions that run at import time or on a CPU are real.

SGLang also honours `sampling_seed` only with --enable-deterministic-inference
(srt/sampling/sampling_batch_info.py:157). It refuses that option for torch_native (srt/arg_groups/overrides.py:1119);
the option enables triton kernels that a CPU does not have (srt/batch_invariant_ops); and its hash needs the operator
`sgl_kernel.murmur_hash32_cpu` (kernels/ops/sampling/murmur_hash.py:115). `_heed_seeds` lifts the refusal, leaves out
the kernels and supplies the operator. The seed then decides the tokens, up to rounding if a batch of another size
computes the same logits.

With --enable-return-routed-experts, SGLang keeps the experts of each token in host memory that it registers with CUDA,
also for a CPU (srt/mem_cache/pool_host/common.py:453). `_keep_routes` allocates plain memory.

Linear attention needs operators of `sgl_kernel` that compute: `v0_5_23_linear.py`.

When it can go: when SGLang's CPU build can be installed from the package index with its own triton and kernels, or
imports these three lazily.

On a GPU without kernels
------------------------

Why: `sgl_kernel` is compiled for one version of torch. With another torch, it does not load.

How (`apply_on_gpu`): a finder at the start of `sys.meta_path` answers imports of `sgl_kernel` alone. Triton is real.
Every operator that derives from BaseFusedOp (kernels/fused_op.py) has a version in torch, which
SGLANG_FORCE_FUSED_OP_BACKEND=torch selects. Attention is Triton with `--attention-backend triton`, which asks
`is_arch_support_pdl` (srt/layers/attention/triton_backend.py:71); `False` is always right. CUDA graphs of prefills need
`weak_ref_tensor` (srt/model_executor/runner_backend_utils/weak_ref_tensor.py:8), so they must be off.

Others it compiles with nvcc at the first request, which takes minutes, and falls back where nvcc fails
(srt/mem_cache/memory_pool.py:175, srt/models/utils.py:521). `_compile_nothing` makes them fall back immediately.

A dense MLP imports CUTLASS's Python package to ask for a kernel of sm_100 (srt/layers/dual_gemm.py:42). Where the
package is missing, `_no_dual_gemm` answers that there is none.

When it can go: when SGLang's kernels use torch's stable ABI.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from bapo_megatron_patches.sglang import v0_5_23_linear

# Package that is missing on a CPU -> modules below `sglang` that import it (a test checks that they still do).
STUBS: dict[str, tuple[str, ...]] = {
    "triton": ("kernels/ops/sampling/murmur_hash.py", "srt/mem_cache/memory_pool.py"),
    "torchvision": ("srt/multimodal/processors/qwen_vl.py",),
    "sgl_kernel": ("srt/layers/activation.py",),
}

KERNELS = "sgl_kernel"  # everything that is called there computes; the other packages are decorators, too

_U32 = 0xFFFFFFFF
_OPS = torch.library.Library("sgl_kernel", "FRAGMENT")  # operators exist only as long as this object


class _Names(type):
    """Metaclass of placeholder classes: every public class attribute exists, and is its own dotted name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _has_tensor(value: Any) -> bool:
    """Return whether a tensor is in a value. Example: _has_tensor(({"x": [torch.ones(1)]}, 2)) is True."""
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _refuse(name: str) -> None:
    raise RuntimeError(
        f"SGLang called {name}, which is not installed here: its placeholder computes nothing. The model or one of the "
        "server's arguments needs it"
    )


class _Placeholder(metaclass=_Names):
    """Stand-in for an imported class: accepts subclassing, use as an annotation, and any arguments without tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _has_tensor((args, kwargs)):
            _refuse(f"{type(self).__module__}.{type(self).__name__}")


class _StubModule(types.ModuleType):
    """A package that has every name: classes for capitalised names, callable stub modules for the others."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 - never changed
    __version__ = "0"  # read by transformers; older than any version that it could use

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = _Names(name, (_Placeholder,), {"__module__": self.__name__})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator, bare or with arguments, that returns the function itself.

        Raises:
            RuntimeError: a tensor is among the arguments, or it is a kernel. Returning would leave its result unset.
        """
        if self.__name__.partition(".")[0] == KERNELS or _has_tensor((args, kwargs)):
            _refuse(self.__name__)
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return _unchanged

    def __getitem__(self, _: Any) -> _StubModule:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _Constexpr:
    """Replacement for triton.language.constexpr, from which modules make constants at import time."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def _cdiv(a: int, b: int) -> int:
    return -(a // -b)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# Names that must have real contents.
_CONTENTS: dict[str, dict[str, Any]] = {
    "triton": {"cdiv": _cdiv, "next_power_of_2": _next_power_of_2},
    "triton.language": {"constexpr": _Constexpr, "dtype": _Placeholder},
    "sgl_kernel.mamba": v0_5_23_linear.MAMBA,
    "sgl_kernel.utils": {"is_arch_support_pdl": lambda: False},
}


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of some packages and everything below them."""

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in self.packages or (root != fullname and not isinstance(sys.modules.get(root), _StubModule)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name, "Placeholder of a package that is not installed.")

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_CONTENTS.get(module.__name__, {}))


def _mix(h: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Mix a block of 32 bits into the state of MurmurHash3_x86_32; uint32 values in int64 tensors."""
    k = _rotate(block * 0xCC9E2D51 & _U32, 15) * 0x1B873593 & _U32
    return _rotate(h ^ k, 13) * 5 + 0xE6546B64 & _U32


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits | x >> (32 - bits)) & _U32


def murmur_hash32(seed_N: torch.Tensor, positions_N: torch.Tensor, col_indices_V: torch.Tensor) -> torch.Tensor:
    """Compute MurmurHash3_x86_32, seed 0, of the 16 bytes (seed, position, column); uint32 [N, V].

    It equals the triton kernel in sglang/kernels/ops/sampling/murmur_hash.py, so the draws are the same as on a GPU.
    N: requests, V: vocabulary.
    """
    seed = seed_N.to(torch.int64)[:, None]
    h = torch.zeros_like(seed)
    for block in (seed & _U32, seed >> 32 & _U32, positions_N.to(torch.int64)[:, None] & _U32):
        h = _mix(h, block)
    h = _mix(h, col_indices_V.to(torch.int64)[None, :] & _U32) ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & _U32
    h = (h ^ h >> 13) * 0xC2B2AE35 & _U32
    return (h ^ h >> 16).to(torch.uint32)


def _heed_seeds() -> None:
    """Allow --enable-deterministic-inference on a CPU, without which a request's `sampling_seed` has no effect.

    torch_native computes each request's attention separately, with or without a cached prefix.
    """
    importlib.import_module("sgl_kernel")
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        _OPS.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
        _OPS.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None


def _plain_memory(dims: tuple[int, ...], dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


def _keep_routes() -> None:
    """Allow --enable-return-routed-experts on a CPU."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory


@functools.cache
def apply() -> None:
    """Answer imports of packages in `STUBS` that are missing, heed seeds, keep routes and compute linear attention.

    Once per process.
    """
    sys.meta_path.append(StubFinder(STUBS))
    _heed_seeds()
    _keep_routes()
    v0_5_23_linear.register(_OPS)


def _compile_nothing() -> None:
    """Let kernels that would be compiled at their first call fail, before a module that has some is imported."""
    names = ("sglang.kernels.jit.utils", "sglang.kernels.jit.utils.compile", "sglang.kernels.jit.utils.compile.loader")
    for module in map(importlib.import_module, names):
        module.load_jit = _fail_to_compile  # type: ignore[attr-defined]


def _fail_to_compile(*names: str, **_: Any) -> Any:
    raise RuntimeError(f"without SGLang's compiled kernels, {'_'.join(names)} is not compiled either")


def _no_dual_gemm() -> None:
    """Let dense models be built without CUTLASS's Python package."""
    from sglang.srt.layers.dual_gemm import DualGemm

    DualGemm._select_mode = lambda *_: None


@functools.cache
def apply_on_gpu(*, has_kernels: bool) -> None:
    """Replace the compiled kernels unless they work, and leave out CUTLASS if it is missing. Once per process."""
    if not has_kernels:
        for name in [name for name in sys.modules if name.partition(".")[0] == KERNELS]:
            del sys.modules[name]  # what an import left there before it failed
        sys.meta_path.insert(0, StubFinder((KERNELS,)))
        _compile_nothing()
    if importlib.util.find_spec("cutlass") is None:
        _no_dual_gemm()
