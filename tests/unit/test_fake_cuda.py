"""The code that runs on GPUs, with fake tensors of a CUDA device: they have shapes and types, but no values.

An operation on tensors of two devices fails, and so does one that waits for the GPU to read a value (`.item()`,
`.tolist()`, `nonzero`), each with its line. torch's autograd engine does not run for such a device, so the backward
passes of our own functions are called by hand. Tables of update rules are left out: they are computed on the CPU.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from bapo_megatron.algorithms.logprobs import VocabShard, _TokenLogProbs
from bapo_megatron.algorithms.losses import LossInputs
from bapo_megatron.algorithms.mismatch import logprob_mismatch
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.learner.elementwise import _GatedActivation, _Rotate
from bapo_megatron.learner.embedding import Lookup
from bapo_megatron.learner.token_metrics import TokenMetrics
from bapo_megatron.types import ClipBounds
from tests.unit.loss_inputs import loss_inputs

CUDA = torch.device("cuda", 0)
NUM_TOKENS = 9


@pytest.fixture(autouse=True)
def devices_that_autograd_knows() -> Iterator[None]:
    """Give CUDA the device guard of "meta", which does nothing: a CPU build has none, and indexing needs one."""
    if torch.version.cuda:
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    kind = torch._C._autograd.DeviceType
    guards[int(kind.CUDA.value)] = guards[int(kind.Meta.value)]
    yield
    guards[int(kind.CUDA.value)] = None


@contextmanager
def fakes() -> Iterator[None]:
    """Make every new tensor a fake one. Tables that the package keeps from before are real ones, on the CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


def on_cuda(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*size, dtype=dtype, device=CUDA)


def moved(record: Any) -> Any:
    """Return a dataclass whose tensors are fake ones on the device."""
    named = {f.name: getattr(record, f.name) for f in fields(record) if f.init}
    tensors = {name: on_cuda(*x.shape, dtype=x.dtype) for name, x in named.items() if isinstance(x, Tensor)}
    return replace(record, **tensors)


class Context(SimpleNamespace):
    """Stand-in for the context that autograd passes to a function."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _: bool) -> None: ...
    def mark_non_differentiable(self, *_: Tensor) -> None: ...


def run_both_passes(function: type[torch.autograd.Function], *arguments: Any) -> None:
    """Run forward and backward; outputs are on the device, gradients have the device and shape of their arguments."""
    context = Context(needs_input_grad=[isinstance(x, Tensor) and x.is_floating_point() for x in arguments])
    outputs = function.forward(context, *arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert {x.device for x in outputs} == {CUDA}
    backward = getattr(function.backward, "__wrapped__", function.backward)  # below once_differentiable
    gradients = backward(context, *map(torch.empty_like, outputs))
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    for argument, gradient in zip(arguments, gradients, strict=True):
        if isinstance(gradient, Tensor):
            assert (gradient.device, gradient.shape) == (argument.device, argument.shape)


def weight(*size: int, dtype: torch.dtype, has_main: bool) -> Tensor:
    made = on_cuda(*size, dtype=dtype)
    if has_main:
        made.main_grad = on_cuda(*size)
    return made


@pytest.mark.parametrize("has_main", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
class TestFunctions:
    @fakes()
    def test_log_probs(self, dtype: torch.dtype, has_main: bool) -> None:
        hidden, targets = on_cuda(NUM_TOKENS, 16, dtype=dtype), on_cuda(NUM_TOKENS, dtype=torch.int64)
        rows = weight(52, 16, dtype=dtype, has_main=has_main)
        shard = VocabShard(None, 0, 52, 50)
        for with_entropy in (True, False):
            run_both_passes(_TokenLogProbs, hidden, rows, targets, 0.7, shard, 4, with_entropy, "torch", has_main)

    @fakes()
    def test_embedding(self, dtype: torch.dtype, has_main: bool) -> None:
        tokens, elsewhere = on_cuda(1, NUM_TOKENS, dtype=torch.int64), on_cuda(1, NUM_TOKENS, dtype=torch.bool)
        for mask in (None, elsewhere):
            run_both_passes(Lookup, weight(52, 16, dtype=dtype, has_main=has_main), tokens, mask, has_main)

    @fakes()
    def test_elementwise(self, dtype: torch.dtype, has_main: bool) -> None:
        run_both_passes(_GatedActivation, on_cuda(NUM_TOKENS, 1, 32, dtype=dtype), has_main)
        angles = [on_cuda(NUM_TOKENS, 1, 1, 8, dtype=dtype) for _ in range(2)]
        run_both_passes(_Rotate, on_cuda(NUM_TOKENS, 1, 4, 8, dtype=dtype), *angles)


def inputs() -> LossInputs[ClipBounds]:
    """Return a loss's inputs with every tensor that it may have."""
    row = torch.zeros(NUM_TOKENS)
    return loss_inputs(
        log_probs_R=row,
        behaviour_logprobs_R=row,
        advantages_R=row,
        mask_R=row.bool(),
        bounds=ClipBounds(low=0.8, high=1.2, positive_share=0.5, saturated=False, num_moves=0),
        proximal_logprobs_R=row,
        reference_logprobs_R=row,
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("options", [{}, {"proximal": "learner", "max_drift": 0.5}, {"kl_coef": 0.1}], ids=str)
def test_a_loss_and_its_metrics(name: str, options: dict[str, Any]) -> None:
    section = LOSSES[name]
    config = section(name=name, **{key: value for key, value in options.items() if key in section.model_fields})
    given = inputs()
    with fakes():
        given = moved(replace(given, batch=moved(given.batch)))
        tokens = config.tokens(given)
        assert tokens.loss_R.device == CUDA
        batch = given.batch
        mismatch = logprob_mismatch(given.log_probs_R, batch.behaviour_logprobs_R, batch.mask_R)
        sums = TokenMetrics().summarize(tokens, mismatch, with_profile=True)
        assert {sums.sums.device, sums.maxima.device} == {CUDA}


def mix(x: Tensor) -> Tensor:
    return x + torch.zeros(NUM_TOKENS)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (mix, RuntimeError),
        (lambda x: x.sum().item(), DataDependentOutputException),
        (lambda x: x.tolist(), DataDependentOutputException),
        (lambda x: float(x.amax()), DataDependentOutputException),
        (lambda x: x.nonzero(), DynamicOutputShapeException),
        (lambda x: x[x > 0], DynamicOutputShapeException),
        (lambda x: "yes" if (x > 0).any() else "no", DataDependentOutputException),
    ],
)
def test_what_would_go_wrong_on_a_gpu_goes_wrong_here(fault: Callable[[Tensor], Any], error: type[Exception]) -> None:
    with fakes(), pytest.raises(error):
        fault(on_cuda(NUM_TOKENS))
