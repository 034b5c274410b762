"""megatron-core 0.16.1 and 0.19.2 on a machine without CUDA.

Why: megatron-core hard-codes the device "cuda", or torch.cuda.current_device(), when it allocates small tensors, for
instance total_num_tokens in pipeline_parallel/schedules.py, _ParamAndGradBuffer in
distributed/param_and_grad_buffer.py, FP32Optimizer._scale in optimizer/optimizer.py, the norms in
optimizer/clip_grads.py and utils.py, receive buffers in pipeline_parallel/p2p_communication.py and
tensor_parallel/mappings.py. The arithmetic itself runs anywhere.

How: only inside the modules of `MODULES`, the global name `torch` is bound to a view of the torch module that puts such
tensors on the CPU. The torch module itself is unchanged, so other libraries are not affected.
`LanguageModule.setup_embeddings_and_output_layer` (language_module.py) calls `Tensor.cuda()`, which is an identity
only during that call. `DistributedOptimizer._build_model_and_main_param_groups` (distrib_optimizer.py) and
`Float16OptimizerWithFloat16Params.__init__` (optimizer.py) recognise types by names such as "torch.cuda.FloatTensor",
which `Tensor.type()` returns only during these calls. The dispatcher of tokens to experts gets the sizes for
all-to-all as arrays (token_dispatcher.py): Megatron makes arrays only of tensors that were on a GPU, and torch takes no
tensors there. `te_general_gemm` (moe_utils.py) is None, as without Transformer Engine in 0.19.2; 0.16.1 leaves the name
unbound and asks for it.

When it can go: when megatron-core takes the device from the process group or the parameters.

One correction is for torch 2.13: `one_thread_per_group`, around `create_group` (parallel_state.py).
"""

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

# Module below megatron.core -> names that it uses from torch and that need a GPU.
MODULES: dict[str, tuple[str, ...]] = {
    "utils": ("tensor", "cuda"),
    "tensor_parallel.layers": ("cuda",),
    "tensor_parallel.mappings": ("cuda",),
    "tensor_parallel.random": ("cuda",),
    "tensor_parallel.utils": ("cuda",),
    "pipeline_parallel.schedules": ("zeros",),
    "pipeline_parallel.p2p_communication": ("cuda",),
    "distributed.param_and_grad_buffer": ("zeros", "cuda"),
    "distributed.distributed_data_parallel": ("cuda",),
    "optimizer.optimizer": ("tensor", "cuda"),
    "optimizer.distrib_optimizer": ("cuda",),
    "optimizer.clip_grads": ("tensor", "zeros"),
    "transformer.moe.router": ("cuda",),
    "transformer.moe.token_dispatcher": ("cuda",),
}
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")


class _View(types.ModuleType):
    """A module with some names replaced; all others are looked up in the original."""

    def __init__(self, original: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _NoStream:
    """Stand-in for a CUDA stream or event: work on a CPU is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def synchronize(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> "_NoStream":
        return self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand in for `maybe_move_tensor_to_cpu`, for tensors that are there already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _nothing(*_: Any, **__: Any) -> None: ...


def cpu_torch() -> _View:
    """Return a view of torch whose CUDA device is the CPU."""
    cuda = _View(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "Stream": _NoStream,
            "Event": _NoStream,
            "current_stream": _NoStream,
            "default_stream": _NoStream,
            "stream": lambda *_: contextlib.nullcontext(),
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        },
    )
    return _View(torch, {"cuda": cuda, **{name: _on_cpu(getattr(torch, name)) for name in FACTORIES}})


@contextlib.contextmanager
def _cuda_is_identity() -> Iterator[None]:
    """Let `Tensor.cuda()` return the tensor itself while this context is open."""
    original = torch.Tensor.cuda
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _types_are_of_cuda() -> Iterator[None]:
    """Let `Tensor.type()` return "torch.cuda.FloatTensor" for CPU tensors while this context is open."""
    original = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


@contextlib.contextmanager
def one_thread_per_group() -> Iterator[None]:
    """Let gloo groups made while this context is open run their collectives in one thread each, not in two.

    Why: torch's two threads write the name of the collective that they have finished to the same string, without a lock
    (pgStatus_->lastCompletedWorkName in runLoop, ProcessGroupGloo.cpp). A name of over 15 characters is on the heap,
    and two writes at the same time free it twice: "malloc(): unaligned tcache chunk detected". The distributed
    optimizer's coalesced all-gather (distributed/param_and_grad_buffer.py) has such a name, ALLGATHER_COALESCED.

    When it can go: when torch takes a lock there.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    original = gloo.__init__

    def with_one_thread(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        options = gloo._Options()
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))  # torch reads it only for its own options
        options._timeout, options._threads = timeout, 1
        for name, value in more.items():  # enable_reconfigure, in torch 2.14 and later
            setattr(options, name, value)
        original(self, store, rank, size, options)

    gloo.__init__ = with_one_thread
    try:
        yield
    finally:
        gloo.__init__ = original


@functools.cache
def _devices(interfaces: str) -> list[Any]:
    """Return gloo's devices, the same for all groups: each has a thread that wakes a hundred times a second."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    named = [gloo.create_device(interface=name) for name in filter(None, interfaces.split(","))]
    return named or [gloo.create_default_device()]


@functools.cache
def apply() -> None:
    """Bind the CPU view of torch inside the megatron-core modules listed above (once per process)."""
    view = cpu_torch()
    for name in MODULES:
        importlib.import_module(f"megatron.core.{name}").torch = view  # type: ignore[attr-defined]

    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]

    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
    create = parallel_state.create_group

    @functools.wraps(create)
    def create_with_one_thread(*args: Any, **kwargs: Any) -> Any:
        with one_thread_per_group():
            return create(*args, **kwargs)

    parallel_state.create_group = create_with_one_thread

    language_module = importlib.import_module("megatron.core.models.common.language_module.language_module")
    setup = language_module.LanguageModule.setup_embeddings_and_output_layer

    @functools.wraps(setup)
    def setup_on_cpu(self: Any) -> None:
        with _cuda_is_identity():
            setup(self)

    language_module.LanguageModule.setup_embeddings_and_output_layer = setup_on_cpu

    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    build = distributed._build_model_and_main_param_groups

    @functools.wraps(build)
    def build_on_cpu(*args: Any, **kwargs: Any) -> Any:
        with _types_are_of_cuda():
            return build(*args, **kwargs)

    distributed._build_model_and_main_param_groups = staticmethod(build_on_cpu)

    mixed = importlib.import_module("megatron.core.optimizer.optimizer").Float16OptimizerWithFloat16Params
    construct = mixed.__init__

    @functools.wraps(construct)
    def construct_on_cpu(*args: Any, **kwargs: Any) -> None:
        with _types_are_of_cuda():
            construct(*args, **kwargs)

    mixed.__init__ = construct_on_cpu

    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _to_cpu
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
