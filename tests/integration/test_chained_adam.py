"""One Adam state for each optimizer of Megatron's chain: for parameters that two ranks copy, and for experts."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bapo_megatron_patches.megatron_core import apply_cpu_compat
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.nn import Module, Parameter

from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT
from bapo_megatron.config.schema import ParallelConfig
from bapo_megatron.learner.adam import ChainedAdam
from bapo_megatron.learner.host_copies import HostCopies
from bapo_megatron.learner.parallel import ParallelLayout
from bapo_megatron.learner.split_model import TrainedModel
from tests.distributed import run_distributed

SHAPES = {"dense": (5, 3), "bias": (7,), "expert": (4, 2)}
LR, CLIP = 0.1, 1.0


def values(name: str, seed: int) -> torch.Tensor:
    return torch.randn(SHAPES[name.split("-")[0]], generator=torch.Generator().manual_seed(seed + 7 * len(name)))


class Model(Module):
    """Two parameters that every rank has, and this rank's expert, marked as Megatron's experts are."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dense, self.bias = Parameter(values("dense", 0)), Parameter(values("bias", 0))
        self.expert = Parameter(values("expert", rank))
        self.expert.allreduce = False  # type: ignore[attr-defined]


def reference() -> dict[str, Parameter]:
    """Return all parameters of both ranks after one update by torch's Adam, clipped by the norm over all of them."""
    wholes = {name: Parameter(values(name, 0)) for name in ("dense", "bias")}
    wholes |= {f"expert {rank}": Parameter(values("expert", rank)) for rank in range(2)}
    for name, parameter in wholes.items():
        rank = int(name[-1]) if name[-1].isdigit() else 0
        parameter.grad = 2 * values(name.split()[0], 10 + rank)
    torch.nn.utils.clip_grad_norm_(wholes.values(), CLIP)
    adam = torch.optim.AdamW(wholes.values(), lr=LR, weight_decay=0.0)
    adam.step()
    return {name: SimpleNamespace(weight=parameter, **adam.state[parameter]) for name, parameter in wholes.items()}  # type: ignore[misc]


def check_chain(rank: int, world_size: int, distributed: bool) -> None:
    apply_cpu_compat()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=world_size, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    layout = ParallelLayout.current(ParallelConfig(data=world_size, expert=world_size))
    assert [layout.axes["dense"].size, layout.axes["dense"].copies.size()] == [1, 2]
    assert [layout.axes["expert"].size, layout.axes["expert"].copies.size()] == [2, 1]
    assert layout.axes["expert"].rank == rank

    model = Model(rank)
    megatron = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, calculate_per_token_loss=True)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    options = OptimizerConfig(optimizer="adam", lr=LR, weight_decay=0.0, use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(megatron, ddp, model)
    chain = get_megatron_optimizer(options, [wrapped], use_gloo_process_groups=False)
    assert len(chain.chained_optimizers) == 2
    adam = ChainedAdam(chain, layout, HostCopies())

    for name, parameter in model.named_parameters():
        parameter.main_grad.copy_(2 * values(name, 10 + (rank if name == "expert" else 0)))
    config: Any = SimpleNamespace(optimizer=SimpleNamespace(weight_decay=0.0, clip_grad=CLIP))
    trained: Any = SimpleNamespace(config=config, optimizer=chain)
    norm = TrainedModel.optimizer_step(trained, LR)
    want = reference()
    assert norm == pytest.approx(2 * sum(values(*of).square().sum().item() for of in GRADIENTS) ** 0.5, rel=1e-6)
    for name, parameter in model.named_parameters():
        expected: Any = want[f"expert {rank}" if name == "expert" else name]
        torch.testing.assert_close(parameter.detach(), expected.weight.detach())
        for part in (WEIGHT, *MOMENTS):
            torch.testing.assert_close(adam.gather(parameter, part), getattr(expected, part).detach())

    parameters = list(model.parameters())
    writes = torch.tensor([is_mine for is_mine, _ in adam.writers(parameters)])
    assert writes[2], "a rank writes its own expert"
    dist.all_reduce(count := writes.long())
    assert count.tolist() == [1, 1, 2]
    assert not adam.writers(parameters)[2][1], "and has all of it"
    assert torch.equal(adam.local(model.expert, "exp_avg"), adam.gather(model.expert, "exp_avg"))

    for part in (WEIGHT, *MOMENTS):
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                adam.fill(part, parameter, values(name, 20).abs())
            assert torch.equal(adam.gather(parameter, part), values(name, 20).abs())
    adam.set_steps(7)
    for one in chain.chained_optimizers:
        assert {state["step"].item() for state in one.optimizer.state.values()} == {7.0}
    parallel_state.destroy_model_parallel()


GRADIENTS = (("dense", 10), ("bias", 10), ("expert", 10), ("expert", 11))


@pytest.mark.parametrize("distributed", [False, True])
def test_dense_parameters_and_experts_have_an_adam_of_their_own(distributed: bool) -> None:
    run_distributed(check_chain, 2, distributed)


class Ready:
    """A chain of one torch Adam, whose gradients are ready, in place of Megatron's."""

    def __init__(self, parameters: list[Parameter], grad_norm: float) -> None:
        self.adam = torch.optim.AdamW([{"params": parameters, "wd_mult": 0.0}], lr=LR)
        self.param_groups = self.adam.param_groups
        self.chained_optimizers = [SimpleNamespace(get_parameters=lambda: parameters)]
        self.prepare_grads = lambda: False
        self.get_grad_norm = lambda: grad_norm
        self.step_with_ready_grads = self.adam.step


def updated(seed: int, grad_norm: float, clip_grad: float, *, always_clips: bool) -> tuple[list[torch.Tensor], int]:
    """Return weights and gradients after an update, and the number of passes that clipped."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [Parameter(torch.randn(size, generator=generator)) for size in (3, 5)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad[0] = -0.0
    clip = torch.nn.utils.clip_grads_with_norm_
    config: Any = SimpleNamespace(optimizer=SimpleNamespace(weight_decay=0.0, clip_grad=clip_grad))
    trained: Any = SimpleNamespace(config=config, optimizer=Ready(parameters, grad_norm))
    with patch.object(torch.nn.utils, "clip_grads_with_norm_", side_effect=clip) as passes:
        if always_clips:
            with patch("bapo_megatron.learner.split_model.exceeds", lambda *_: True):
                TrainedModel.optimizer_step(trained, LR)
        else:
            TrainedModel.optimizer_step(trained, LR)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*(parameter.detach() for parameter in parameters), *gradients], passes.call_count


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6), st.integers(-40, 40) | st.floats(1e-3, 1e3))
def test_only_a_norm_above_the_limit_costs_a_pass_over_the_gradients(seed: int, clip_grad: float, off: float) -> None:
    """Near the limit, in steps of float32, and far from it: the same bits as clipping always."""
    near = np.float32(clip_grad)
    near = near + off * np.spacing(near) if isinstance(off, int) else near * off
    want, _ = updated(seed, float(near), clip_grad, always_clips=True)
    got, passes = updated(seed, float(near), clip_grad, always_clips=False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), "bits, signs of zeros included"
    factor = torch.tensor(float(near)).add(1e-6).reciprocal().mul(clip_grad)
    if abs(float(factor) - 1) > 1e-6:
        assert passes == (factor < 1)
