"""The CPU compatibility of megatron-core: it finds what it corrects, and changes nothing else."""

import contextlib
import importlib
import inspect
import os
import re
import subprocess
import sys
import time
import types
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bapo_megatron_patches.megatron_core as patches
import pytest
import torch
import torch.distributed as dist
from bapo_megatron_patches.megatron_core import cpu
from megatron.core import parallel_state

from bapo_megatron.config.schema import ParallelConfig
from bapo_megatron.learner.parallel import start_processes, stop_processes
from tests.distributed import HANG_S, in_new_process

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched if CUDA is available")


def test_the_installed_version_is_the_one_for_this_python() -> None:
    assert version("megatron-core") == patches.ADVISED


@pytest.mark.parametrize(("module", "names"), cpu.MODULES.items())
def test_each_module_still_names_the_gpu(module: str, names: tuple[str, ...]) -> None:
    """A module that no longer names the GPU must be taken off the list."""
    source = inspect.getsource(importlib.import_module(f"megatron.core.{module}"))
    for name in names:
        pattern = r"torch\.cuda\.\w+\(" if name == "cuda" else rf"torch\.{name}\([^\n]*device=['\"]cuda['\"]"
        assert re.search(pattern, source), f"megatron.core.{module} has no {pattern}"


def test_functions_that_are_replaced_exist() -> None:
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    assert callable(rng._get_cuda_rng_state)
    assert callable(rng._set_cuda_rng_state)
    language = importlib.import_module("megatron.core.models.common.language_module.language_module")
    setup = inspect.unwrap(language.LanguageModule.setup_embeddings_and_output_layer)
    assert ".cuda()" in inspect.getsource(setup)
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    assert "'torch.cuda.FloatTensor'" in inspect.getsource(
        inspect.unwrap(distributed._build_model_and_main_param_groups)
    )
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    assert "maybe_move_tensor_to_cpu(" in inspect.getsource(dispatcher)
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    assert "is_cuda" in inspect.getsource(moe_utils.maybe_move_tensor_to_cpu)
    assert "te_general_gemm is not None" in inspect.getsource(moe_utils)


def test_torch_itself_stays_as_it_is() -> None:
    code = """
import torch
before = {name: id(value) for name, value in vars(torch).items()}, torch.Tensor.cuda, dict(vars(torch.cuda))
tensor_type = torch.Tensor.type
import bapo_megatron_patches.megatron_core as patches
import megatron.core
import megatron.core.pipeline_parallel.schedules as schedules
from tests.distributed import HANG_S
names = set(before[0])
patches.apply_cpu_compat()
assert schedules.torch is not torch
assert schedules.torch.zeros(1, device="cuda").device.type == "cpu"
for factory in ("tensor", "zeros", "ones", "empty", "full", "arange"):
    assert id(getattr(torch, factory)) == before[0][factory], factory
assert torch.Tensor.cuda is before[1]
assert torch.Tensor.type is tensor_type
assert torch.zeros(1).type() == "torch.FloatTensor"
assert torch.cuda.current_device is before[2]["current_device"]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=HANG_S)


def count_loops() -> int:
    """Count the threads of gloo's devices; each gives itself its name once it runs."""
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            count += task.read_text() == "gloo_tcp_loop\n"
    return count


def make_gloo_groups() -> tuple[set[int], int, bool, str]:
    """Return the thread counts of Megatron's groups and the number of their devices' threads, whether torch's class is
    restored, and a wrong interface's error."""
    original = dist.ProcessGroupGloo.__init__
    patches.apply_cpu_compat()
    start_processes(ParallelConfig())
    groups = parallel_state._global_process_group_list[1:]  # the first stands for the default group
    assert parallel_state.get_data_parallel_group(with_context_parallel=True) in groups
    threads = {group._get_backend(torch.device("cpu")).options._threads for group in groups}
    deadline = time.monotonic() + HANG_S
    while (num_loops := count_loops()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    parallel_state.create_group([0])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,no-such-interface"
    with pytest.raises(RuntimeError) as caught:
        parallel_state.create_group([0])
    stop_processes()
    return threads, num_loops, dist.ProcessGroupGloo.__init__ is original, str(caught.value)


def test_gloo_groups_of_megatron_have_one_thread() -> None:
    """Two threads occasionally corrupt the heap. The groups use the environment's interfaces, as torch's own do, and
    share the thread that listens there."""
    threads, num_loops, stays_as_it_is, error = in_new_process(make_gloo_groups)
    assert threads == {1}
    assert num_loops == 2, "the default group has its own"
    assert stays_as_it_is
    assert "no-such-interface" in error


def make_group_with_more_options() -> tuple[int, str]:
    patches.apply_cpu_compat()
    with cpu.one_thread_per_group():
        more = {"group_name": "named"}  # torch 2.14 passes another one, enable_reconfigure
        group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=HANG_S), **more)
    return group.options._threads, group.options.group_name


def test_gloo_groups_of_megatron_keep_the_options_of_newer_torch() -> None:
    assert in_new_process(make_group_with_more_options) == (1, "named")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "version", lambda package: "0.17.0")
    with pytest.raises(RuntimeError, match=r"needs megatron-core 0\.16\.1 or 0\.19\.2, found 0\.17\.0"):
        patches.apply_cpu_compat()


def test_kernels_of_transformer_engine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2.11 has `utils.SplitAlongDim`, not `attention._SplitAlongDim`, and not all kernels that 0.19.2 wants."""
    attention = importlib.import_module("megatron.core.transformer.attention")
    clipping = importlib.import_module("megatron.core.optimizer.clip_grads")
    assert "SplitAlongDim(mixed_qkv, 3, split_arg_list)" in inspect.getsource(attention)
    before = {
        name: getattr(clipping, name) for name in ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")
    }
    for name, function in before.items():
        monkeypatch.setattr(clipping, name, function)  # restored afterwards
    monkeypatch.setattr(attention, "SplitAlongDim", None)
    patches.apply_engine_compat()
    assert attention.SplitAlongDim is None, "Transformer Engine is not installed here"
    assert before == {name: getattr(clipping, name) for name in before}

    class SplitAlongDim(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dim, sizes):  # type: ignore[no-untyped-def]
            return x.split(sizes, dim)

    engine = types.ModuleType("transformer_engine.pytorch")
    kernels = types.SimpleNamespace(
        multi_tensor_applier="applier", multi_tensor_l2norm="norm", multi_tensor_scale="scale"
    )
    engine.optimizers = kernels  # type: ignore[attr-defined]
    utils = types.ModuleType("transformer_engine.pytorch.utils")
    utils.SplitAlongDim = SplitAlongDim  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    for module in (engine, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patches.apply_engine_compat()
    first, second = attention.SplitAlongDim(torch.arange(3.0), 0, [1, 2])
    assert (first.tolist(), second.tolist()) == ([0.0], [1.0, 2.0])
    assert [getattr(clipping, name) for name in before] == ["applier", "norm", "scale"]
    clipping.l2_norm_impl = "apex"  # type: ignore[attr-defined]
    patches.apply_engine_compat()
    assert clipping.l2_norm_impl == "apex", "its kernels are as good"
