"""The CPU compatibility of SGLang: it finds what it replaces, and reports when it no longer applies."""

import ast
import importlib.util
import os
import re
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import bapo_megatron_patches.sglang as patches
import pytest
import torch
from bapo_megatron_patches.sglang import v0_5_23, v0_5_23_linear

from bapo_megatron.engines.sglang_kernels import NAMES
from bapo_megatron.kernels.delta_rule import rule_of_chunk
from tests.distributed import HANG_S

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang is not installed; scripts/install_sglang_cpu.sh does that",
)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched if CUDA is available")


def sglang_source(module: str) -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return (Path(spec.submodule_search_locations[0]) / module).read_text()


@needs_sglang
def test_installed_version_is_the_supported_one() -> None:
    assert version("sglang") == patches.SUPPORTED


@needs_sglang
@pytest.mark.parametrize(("package", "modules"), v0_5_23.STUBS.items())
def test_each_stub_is_still_needed(package: str, modules: tuple[str, ...]) -> None:
    """A package that SGLang no longer imports at the top of these modules must be taken off the list."""
    for module in modules:
        lines = sglang_source(module).splitlines()
        found = [line for line in lines if line.strip().startswith((f"import {package}", f"from {package}"))]
        assert found, f"{module} no longer imports {package}"


@needs_sglang
@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("srt/sampling/sampling_batch_info.py", "if enable_deterministic"),
        ("srt/arg_groups/overrides.py", "attention backends are supported for deterministic inference"),
        (
            "srt/model_executor/model_runner.py",
            "from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode",
        ),
        ("kernels/ops/sampling/murmur_hash.py", "torch.ops.sgl_kernel.murmur_hash32_cpu"),
    ],
)
def test_what_seeds_need_is_still_there(module: str, text: str) -> None:
    assert text in sglang_source(module)


@needs_sglang
@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("srt/state_capturer/base.py", "alloc = ALLOC_MEMORY_FUNCS[device]"),
        (
            "srt/mem_cache/pool_host/common.py",
            "ALLOC_MEMORY_FUNCS = defaultdict(\n    lambda: alloc_with_host_register,",
        ),
    ],
)
def test_the_memory_of_routes_is_still_registered_with_cuda(module: str, text: str) -> None:
    assert text in sglang_source(module)


@needs_sglang
@pytest.mark.parametrize(("module", "names"), NAMES.items())
def test_the_self_test_looks_for_what_sglang_imports(module: str, names: tuple[str, ...]) -> None:
    """Of the kernels for CUDA: other platforms import other names in other branches."""
    found = {
        f"{package}.{alias.name}".removeprefix("sgl_kernel").removeprefix(".")
        for node in ast.walk(ast.parse(sglang_source(module)))
        if isinstance(node, ast.ImportFrom) and (package := node.module or "").partition(".")[0] == "sgl_kernel"
        for alias in node.names
    }
    assert set(names) <= found


@needs_sglang
@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("srt/layers/dual_gemm.py", "self.mode = self._select_mode(gate_up_proj, hidden_size)"),
        ("srt/layers/dual_gemm.py", "from sglang.kernels.ops.gemm.cutedsl_dual_gemm import"),
        ("kernels/ops/gemm/cutedsl_dual_gemm.py", "\nimport cutlass\n"),
        (
            "kernels/ops/kvcache/kvcache.py",
            "_jit_kvcache_module(k_row_bytes, v_row_bytes, num_threads)\n        return True",
        ),
        ("kernels/ops/layernorm/norm.py", "_jit_qknorm_module(head_dim, dtype)\n        return True"),
        ("srt/environ.py", 'SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND = EnvStr("rust")'),
        ("kernels/fused_op.py", 'KernelBackend.TORCH: "forward_native"'),
        ("srt/models/qwen3_moe.py", "if enable_fused_set_kv_buffer(forward_batch)"),
        ("srt/layers/attention/linear/gdn_backend.py", "causal_conv1d_fn = causal_conv1d_fn_cuda"),
    ],
)
def test_what_serving_without_kernels_replaces_is_still_there(module: str, text: str) -> None:
    assert text in sglang_source(module)


@pytest.mark.slow
@needs_sglang
def test_nothing_is_compiled_and_broken_kernels_are_replaced(tmp_path: Path) -> None:
    """A broken sgl_kernel on the path, and a part of it that stayed from a failed import; Triton is not replaced."""
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("from . import half; raise ImportError('undefined symbol')")
    (tmp_path / "sgl_kernel" / "half.py").write_text("")
    code = """
import sys, torch, bapo_megatron_patches.sglang as patches
from bapo_megatron_patches.sglang import v0_5_23
try:
    import sgl_kernel
except ImportError as error:
    assert "undefined symbol" in str(error) and "sgl_kernel.half" in sys.modules
sys.meta_path.append(v0_5_23.StubFinder(("triton", "torchvision")))  # this machine lacks them
patches.apply_gpu_compat(has_kernels=False)
patches.apply_gpu_compat(has_kernels=False)
from sgl_kernel import rmsnorm
from sgl_kernel.utils import is_arch_support_pdl
assert is_arch_support_pdl() is False
for call in (rmsnorm, lambda x: rmsnorm(out=[x])):
    try:
        call(torch.zeros(2))
    except RuntimeError as error:
        assert "SGLang called sgl_kernel.rmsnorm, which is not installed here" in str(error)
    else:
        raise SystemExit("it returned")
from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache
from sglang.srt.layers.dual_gemm import DualGemm
assert can_use_store_cache(256) is False
assert DualGemm._select_mode(None, None, 64) is None
assert sum(isinstance(finder, v0_5_23.StubFinder) for finder in sys.meta_path) == 2
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.endswith("right\n"), done.stderr


@needs_sglang
def test_linear_attention_still_takes_these_operators() -> None:
    folder = "srt/layers/attention/linear"
    modules = ["srt/models/qwen3_5.py", f"{folder}/gdn_backend.py", f"{folder}/kernels/gdn_triton.py"]
    norm = sglang_source("kernels/ops/attention/fla/layernorm_gated.py")
    assert "if _use_cpu:" in norm
    text = "\n".join([norm, *map(sglang_source, modules)])
    operators = {*re.findall(r"torch\.ops\.sgl_kernel\.(\w+)", text)} - {"fused_input_proj_cpu"}  # of CPUs with AMX
    functions = {name for line in re.findall(r"from sgl_kernel\.mamba import (.*)", text) for name in line.split(", ")}
    assert operators == {function.__name__ for function in v0_5_23_linear.OPERATORS}
    assert functions == v0_5_23_linear.MAMBA.keys()


@needs_sglang
def test_the_shared_expert_is_still_added_by_this_function() -> None:
    source = sglang_source("srt/models/qwen2_moe.py")
    imported = re.search(r"from sglang\.kernels\.ops\.elementwise\.elementwise import \(([^)]*)\)", source)
    assert imported is not None
    assert "fused_gate_sigmoid_mul_add," in imported[1]
    call = re.search(r"\bfused_gate_sigmoid_mul_add\(([^()]*(?:\(\)[^()]*)*)\)", source)
    assert call is not None
    given = [argument.strip() for argument in call[1].split(",") if argument.strip()]
    assert given == [
        "hidden_states",
        "self.shared_expert_gate.weight.squeeze()",
        "shared_output",
        "final_hidden_states",
    ]


def test_requests_of_one_batch_keep_their_states_from_piece_to_piece() -> None:
    """Two prefills and one step of decoding, in slots among others, equal one pass of each request."""
    torch.manual_seed(0)
    heads, value_heads, dim, value_dim, width = 2, 4, 8, 6, 4
    sizes = (heads * dim, heads * dim, value_heads * value_dim)
    weight, A_log, dt_bias = torch.randn(sum(sizes), width), torch.randn(value_heads), torch.randn(value_heads)
    inputs = [torch.randn(length, sum(sizes)) for length in (9, 5)]
    gates = [torch.randn(length, 2, value_heads) for length in (9, 5)]  # a and b
    conv, states = torch.zeros(5, sum(sizes), width - 1), torch.zeros(5, value_heads, value_dim, dim)
    slots = torch.tensor([3, 1], dtype=torch.int32)

    def heads_of(mixed_TC: torch.Tensor) -> list[torch.Tensor]:
        split = zip(mixed_TC.split(sizes, -1), (dim, dim, value_dim), strict=True)
        return [x.unflatten(-1, (-1, size))[None] for x, size in split]

    def prefill(*pieces: slice) -> list[torch.Tensor]:
        x_TC, ab = (torch.cat([x[p] for x, p in zip(xs, pieces, strict=True)]) for xs in (inputs, gates))
        lengths = [p.stop - p.start for p in pieces]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        mixed_CT = v0_5_23_linear.causal_conv1d_fn_cpu(
            x_TC.mT,
            weight,
            None,
            activation="silu",
            conv_states=conv,
            has_initial_state=torch.tensor([p.start > 0 for p in pieces]),
            cache_indices=slots,
            query_start_loc=starts,
        )
        gating = v0_5_23_linear.fused_gdn_gating_cpu(A_log, *ab.unbind(1), dt_bias)
        out, *_ = v0_5_23_linear.chunk_gated_delta_rule_cpu(
            *heads_of(mixed_CT.mT), *gating, initial_state=states, initial_state_indices=slots, cu_seqlens=starts
        )
        return list(out[0].split(lengths))

    def decode() -> list[torch.Tensor]:
        x_RC, ab = (torch.stack([x[-1] for x in xs]) for xs in (inputs, gates))
        mixed_RC = v0_5_23_linear.causal_conv1d_update_cpu(x_RC, conv, weight, None, "silu", conv_state_indices=slots)
        out = v0_5_23_linear.fused_sigmoid_gating_delta_rule_update_cpu(
            *(A_log, dt_bias, *heads_of(mixed_RC), *ab.unbind(1)), *(states, slots, torch.arange(3), True, 1.0, 20.0)
        )
        return list(out[0].split(1))

    found = [prefill(slice(0, 6), slice(0, 1)), prefill(slice(6, 8), slice(1, 4)), decode()]
    for request, (x_TC, ab) in enumerate(zip(inputs, gates, strict=True)):
        line_CT = torch.nn.functional.pad(x_TC.mT, (width - 1, 0))
        mixed_CT = torch.nn.functional.silu(torch.nn.functional.conv1d(line_CT, weight[:, None], groups=sum(sizes)))
        gating = (x[..., None] for x in v0_5_23_linear.fused_gdn_gating_cpu(A_log, *ab.unbind(1), dt_bias))
        parts = (x.transpose(1, 2) for x in (*heads_of(mixed_CT.mT), *gating))
        expected, state = rule_of_chunk((*parts, torch.zeros(1, value_heads, dim, value_dim)))
        torch.testing.assert_close(
            torch.cat([x[request] for x in found]), expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(states[slots[request]], state[0].mT, atol=1e-5, rtol=1e-5)
    assert not any(x[[0, 2, 4]].any() for x in (conv, states)), "slots of others"


@needs_sglang
def test_servers_and_their_schedulers_do_without_megatron_core() -> None:
    """It would switch torch_memory_saver to a mode without CUDA graphs. Schedulers import this module again."""
    code = """
import sys
from bapo_megatron.engines import sglang_server
import sglang.srt.debug_utils.dumper as dumper
assert not dumper._MegatronPlugin._available
assert not [name for name in sys.modules if name.startswith("megatron.")]
"""
    assert "_MegatronPlugin" in sglang_source("srt/debug_utils/dumper.py")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "version", lambda package: "0.6.0")
    with pytest.raises(RuntimeError, match=r"needs sglang 0\.5\.23, found 0\.6\.0.*install_sglang_cpu"):
        patches.apply_cpu_compat()


def test_stubs_answer_only_for_packages_that_are_missing() -> None:
    code = """
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
missing = ("triton", "torchvision")  # torch's CUDA build brings triton
PathFinder.find_spec = staticmethod(lambda name, *a: None if name.partition(".")[0] in missing else found(name, *a))
import bapo_megatron_patches.sglang.v0_5_23 as patch
sys.meta_path.append(patch.StubFinder(patch.STUBS))
import triton, triton.language as tl
from triton.language.extra import libdevice
from torchvision.transforms import InterpolationMode
def kernel(): return 5
assert triton.jit(kernel) is kernel
assert triton.autotune(configs=[], key=[])(kernel) is kernel
assert triton.cdiv(7, 2) == 4 and triton.next_power_of_2(5) == 8 and triton.next_power_of_2(8) == 8
assert tl.constexpr(3).value == 3
assert InterpolationMode.BICUBIC != InterpolationMode.NEAREST
for name in ("no_such_package", "math.no_such_module"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} was imported")
import json, math
from tests.distributed import HANG_S
assert not isinstance(json, patch._StubModule)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=HANG_S)


def murmur3_x86_32(data: bytes) -> int:
    """Return MurmurHash3_x86_32 of whole blocks with seed 0, as its author published it."""

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    h = 0
    for (block,) in struct.iter_unpack("<I", data):
        h ^= rotate(block * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotate(h, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_hash_of_seeds_is_murmur3() -> None:
    assert murmur3_x86_32(b"test") == 0xBA6BD213, "a published value"
    seeds, positions, vocab = [0, 7, 2**40 + 3, 2**63 - 1], [0, 1, 500, 70_000], 5
    hashed = v0_5_23.murmur_hash32(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(vocab, dtype=torch.int64)
    )
    expected = [
        [murmur3_x86_32(struct.pack("<QII", s, p, column)) for column in range(vocab)]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == expected
