"""The code that runs on GPUs, with fake tensors of a CUDA device: they have shapes and types, but no values.

An operation on tensors of two devices fails, and so does one that waits for the GPU to read a value (`.item()`,
`.tolist()`, `nonzero`), each with its line. torch's autograd engine does not run for such a device, so the backward
passes of our own functions are called by hand. Tables of update rules are left out: they are computed on the CPU.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn import Parameter

from bapo_megatron.algorithms.logprobs import VocabShard, _TokenLogProbs
from bapo_megatron.algorithms.losses import LossInputs
from bapo_megatron.algorithms.mismatch import logprob_mismatch
from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import SelectingLoss
from bapo_megatron.learner import adam, split_model
from bapo_megatron.learner.adam import AdamState, ChainedAdam
from bapo_megatron.learner.attention import PackedAttention
from bapo_megatron.learner.elementwise import _GatedActivation, _Rotate, rotation_of
from bapo_megatron.learner.embedding import Lookup
from bapo_megatron.learner.host_copies import HostCopies
from bapo_megatron.learner.packs import Block, PackedSequences, _Place, make_blocks
from bapo_megatron.learner.token_metrics import TokenMetrics
from bapo_megatron.types import ClipBounds
from tests.unit.loss_inputs import found_of, loss_inputs

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
    if isinstance(config, SelectingLoss):
        given = replace(given, found=found_of(config, given))
    with fakes():
        given = replace(moved(given), batch=given.batch.to(CUDA))
        tokens = config.tokens(given)
        assert tokens.loss_R.device == CUDA
        batch = given.batch
        mismatch = logprob_mismatch(given.log_probs_R, batch.behaviour_logprobs_R, batch.mask_R)
        sums = TokenMetrics().summarize(tokens, mismatch, with_profile=True)
        assert {sums.sums.device, sums.maxima.device} == {CUDA}


def moved_block(block: Block) -> Block:
    return replace(moved(block), queries=moved(block.queries), keys=moved(block.keys))


@pytest.mark.parametrize("context_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pack_in_attention(dtype: torch.dtype, context_size: int) -> None:
    """Describe a pack, whose lengths stay on the CPU, rotate its queries and keys, and attend."""
    cu_seqlens_S1 = torch.tensor([0, 4, 20, 36], dtype=torch.int32)
    blocks = make_blocks(cu_seqlens_S1, 0, context_size)
    num_tokens, positions_T = 36 // context_size, torch.arange(36 // context_size)
    with fakes():
        pack = PackedSequences(blocks=[moved_block(block) for block in blocks])
        pack.gather = lambda k_T1KD, v_T1KD: (on_cuda(36, 2, 8, dtype=dtype), on_cuda(36, 2, 8, dtype=dtype))  # type: ignore[method-assign]
        pack.rotation = rotation_of(torch.outer(positions_T.to(CUDA).float(), on_cuda(4)), dtype)
        q_T1ND, k_T1KD, v_T1KD = (on_cuda(num_tokens, 1, heads, 8, dtype=dtype) for heads in (4, 2, 2))
        out_T1X = PackedAttention(None, 0.3)(q_T1ND, k_T1KD, v_T1KD, packed_seq_params=pack)  # type: ignore[arg-type]
        assert (out_T1X.device, out_T1X.dtype, out_T1X.shape) == (CUDA, dtype, (num_tokens, 1, 32))
        for block in pack.blocks or ():
            queries = block.queries
            places = (queries.packed_B, queries.padded_B, queries.num_sequences * queries.length)
            run_both_passes(_Place, on_cuda(num_tokens, 4, 8, dtype=dtype), *places)


SHAPE, OWNED = (6, 4), slice(3, 15)  # a bfloat16 parameter, and a rank's range of it


def mixed_optimizer(parameter: Parameter) -> Any:
    """Return Megatron's optimizer with float32 main weights."""
    inner = torch.optim.Adam([{"params": [parameter], "wd_mult": 1.0}])
    made = Float16OptimizerWithFloat16Params.__new__(Float16OptimizerWithFloat16Params)
    construct = unwrap(Float16OptimizerWithFloat16Params.__init__)  # without the correction for a run on a CPU
    construct(made, inner, OptimizerConfig(optimizer="adam", bf16=True), None, None)
    return made


def split_optimizer(parameter: Parameter) -> Any:
    """Return Megatron's distributed optimizer, as far as `AdamState` reads it."""
    made = DistributedOptimizer.__new__(DistributedOptimizer)
    made.optimizer = torch.optim.Adam([Parameter(on_cuda(OWNED.stop - OWNED.start))])
    made.model_param_group_index_map = {parameter: (0, 0)}
    made._get_model_param_range_map = lambda _: {"param": SimpleNamespace(start=OWNED.start, end=OWNED.stop)}
    return made


@pytest.fixture
def parameter() -> Parameter:
    with fakes():
        made = Parameter(on_cuda(*SHAPE, dtype=torch.bfloat16))
        made.main_grad = on_cuda(*SHAPE)
        return made


@pytest.mark.parametrize("make", [mixed_optimizer, split_optimizer])
def test_adams_state(make: Callable[[Parameter], Any], parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill, count and gather on the device what a checkpoint holds, which comes from the CPU."""
    monkeypatch.setattr(adam, "dist", SimpleNamespace(all_reduce=lambda tensor, group: tensor))
    with fakes():
        state = AdamState(make(parameter), None, HostCopies())  # type: ignore[arg-type]
        for name in (WEIGHT, *MOMENTS):
            state.fill(name, parameter, torch.zeros(SHAPE))
        of_adam = state._state(state._weight(parameter))
        assert {name: x.device for name, x in of_adam.items()} == dict.fromkeys(("step", *MOMENTS), CUDA)
        state.set_steps(3)
        gathered = [state.gather(parameter, name) for name in (WEIGHT, *MOMENTS)]
        for whole in (*gathered, state.gather_gradient(parameter)):
            assert (whole.device, whole.dtype, whole.shape) == (CUDA, torch.float32, SHAPE)
        assert of_adam["step"].device == CUDA


def test_an_optimizer_step(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy gradients to main weights, clip, step and copy back; the norm, which the CPU reads, is the only wait."""
    monkeypatch.setattr(split_model, "device", lambda: CUDA)
    with fakes():
        one = mixed_optimizer(parameter)
        chain = ChainedOptimizer([one])
        chain.get_grad_norm = lambda: 2.0
        ChainedAdam(chain, SimpleNamespace(axes={"dense": SimpleNamespace(copies=None)}), HostCopies())  # type: ignore[arg-type]
        model = SimpleNamespace(config=Config(), optimizer=chain)
        assert split_model.TrainedModel.optimizer_step(model, 1e-3) == 2.0  # type: ignore[arg-type]
        assert {x.device for x in one.optimizer.state[parameter.main_param].values()} == {CUDA}


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
