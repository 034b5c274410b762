"""How SGLang serves on a GPU: when its kernels are used, what replaces them, and which models are refused."""

import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bapo_megatron_patches.sglang import v0_5_23
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import rms_norm, silu

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.engines import ENGINES
from bapo_megatron.config.load import load_config
from bapo_megatron.engines import sglang_kernels
from bapo_megatron.engines.sglang_kernels import NAMES, VARIABLE, Serving
from bapo_megatron.errors import UserError
from bapo_megatron.preflight import check, inputs, software_checks
from bapo_megatron.resolved import resolve
from tests.hybrid_model import save_hybrid
from tests.mixture_model import save_mixture


def rmsnorm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(x_TH.float(), x_TH.shape[-1:], weight_H.float(), eps).to(x_TH.dtype)


def fused_add_rmsnorm(x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> None:
    residual_TH += x_TH
    x_TH.copy_(rmsnorm(residual_TH, weight_H, eps))


def silu_and_mul(x_TH: torch.Tensor, out_TH: torch.Tensor) -> None:
    gate_TH, up_TH = x_TH.float().chunk(2, -1)
    out_TH.copy_(silu(gate_TH) * up_TH)


RIGHT = {"rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm, "silu_and_mul": silu_and_mul}


def nothing(*_: Any) -> torch.Tensor:
    """Compute nothing, as a placeholder would."""
    return torch.zeros(5, 256)


def put_kernels(monkeypatch: pytest.MonkeyPatch, without: str = "", **wrong: Callable[..., Any]) -> None:
    """Let `import sgl_kernel` find kernels that compute in torch."""
    modules = {"": types.ModuleType("sgl_kernel"), "utils": types.ModuleType("sgl_kernel.utils")}
    functions = dict.fromkeys((name for names in NAMES.values() for name in names), nothing) | RIGHT | wrong
    for name, function in functions.items():
        owner, _, last = name.rpartition(".")
        if name != without:
            setattr(modules[owner], last, function)
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_right_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    put_kernels(monkeypatch)
    sglang_kernels.self_test("cpu")


@pytest.mark.parametrize("name", RIGHT)
def test_a_kernel_that_computes_something_else_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_kernels(monkeypatch, **{name: nothing})
    with pytest.raises(RuntimeError, match=f"^its {name} computes something else than torch$"):
        sglang_kernels.self_test("cpu")


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_a_version_without_a_kernel_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_kernels(monkeypatch, without=name)
    with pytest.raises(ImportError, match=f"^it has no {re.escape(name)}: another version"):
        sglang_kernels.self_test("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ImportError('common_ops.so: undefined symbol: _ZN3c10')", "undefined symbol: _ZN3c10"),
        ("import ctypes; ctypes.CDLL('libnosuch.so.13')", "libnosuch.so.13: cannot open shared object file"),
        ("import os; os.kill(os.getpid(), 11)", "it ended without output"),
        ("def __getattr__(name): raise AttributeError(name)", "it has no silu_and_mul: another version than SGLang's?"),
    ],
)
def test_a_library_that_does_not_load_is_one_line(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    problem = sglang_kernels.kernels_problem("cpu")
    assert problem.startswith("sgl_kernel cannot be used: ")
    assert told in problem
    assert len(problem.splitlines()) == 1


def on_gpu(monkeypatch: pytest.MonkeyPatch, problem: str, pins: str = "2.14.1", mine: str = "2.14.1") -> None:
    """Pretend that there is a GPU, this torch, and a self-test with this result."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", mine)
    monkeypatch.setattr(sglang_kernels, "kernels_problem", lambda device: problem)
    monkeypatch.setattr(sglang_kernels.importlib.metadata, "requires", lambda name: ["numpy", f"torch=={pins}"])
    monkeypatch.setenv(VARIABLE, "on")  # so that its end is restored
    monkeypatch.delenv(VARIABLE)


RUST = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
SKIP = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"
FUSED = "SGLANG_FORCE_FUSED_OP_BACKEND"
IN_TORCH = "--attention-backend triton --sampling-backend pytorch --grammar-backend none"


@pytest.mark.parametrize(
    ("problem", "mine", "variables", "arguments", "line"),
    [
        ("", "2.14.1", {}, "", "its compiled kernels, which pass a self-test"),
        ("", "2.14.9+cu130", {}, "", "its compiled kernels, which pass a self-test"),
        ("", "2.11.0+cu130", {RUST: "python", SKIP: "1"}, IN_TORCH, "with torch 2.11.0 instead of 2.14.1"),
        (
            "sgl_kernel is not installed",
            "2.14.1",
            {SKIP: "1", FUSED: "torch"},
            f"{IN_TORCH} --disable-prefill-cuda-graph",
            "slower but right: no kernels, sgl_kernel is not installed",
        ),
        (
            "sgl_kernel cannot be used: undefined symbol",
            "2.11.0",
            {RUST: "python", SKIP: "1", FUSED: "torch"},
            f"{IN_TORCH} --disable-prefill-cuda-graph",
            "slower but right: no kernels, sgl_kernel cannot be used: undefined symbol",
        ),
    ],
)
def test_the_choice(
    problem: str, mine: str, variables: dict[str, str], arguments: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, problem, mine=mine)
    serving = sglang_kernels.choose()
    assert (serving.variables, " ".join(serving.arguments)) == (variables, arguments)
    assert line in serving.line
    assert len(serving.line.splitlines()) == 1
    monkeypatch.setattr(sglang_kernels, "kernels_problem", None)  # a process that this one starts does not ask again
    assert sglang_kernels.choose() == serving


def test_a_cpu_needs_the_other_radix_tree_only(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, "", mine="2.13.0+cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    serving = sglang_kernels.choose()
    assert (serving.variables, serving.arguments, serving.is_usual) == ({RUST: "python"}, [], True)
    assert VARIABLE not in os.environ


def test_the_variable_decides_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, "too old")
    for value, problem in (("on", ""), ("off", f"{VARIABLE}=off"), ("off: mine", "mine")):
        monkeypatch.setenv(VARIABLE, value)
        assert sglang_kernels.choose().problem == problem
    for value in ("", "yes", "offline", "on: why"):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(UserError, match=f'^{VARIABLE} must be "on" or "off", or unset, got {value!r}$'):
            sglang_kernels.choose()


def test_models_that_need_kernels_are_refused(tmp_path: Path) -> None:
    hybrid, mixture = tmp_path / "hybrid", tmp_path / "mixture"
    save_hybrid(hybrid, 0, 64)
    save_mixture(mixture, 0, 64)
    without = Serving(on_gpu=True, problem="sgl_kernel is not installed")
    assert without.refusal(demo_model_path()) == ""
    assert without.refusal(tmp_path / "of a family that only SGLang knows") == ""
    for folder, what in ((hybrid, "linear attention"), (mixture, "a mixture of experts")):
        assert Serving(on_gpu=True, foreign="torch 2.11.0 instead of 2.14.1").refusal(folder) == ""
        refusal = without.refusal(folder)
        assert refusal.startswith(f"{folder} has {what}, which SGLang computes with compiled kernels only")
        assert "sgl_kernel is not installed; scripts/install_gpu.sh" in refusal


def test_check_and_doctor_say_which_way_serving_will_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_gpu(monkeypatch, "sgl_kernel is not installed")
    monkeypatch.setattr(software_checks, "installed_version", lambda name: "0.5.23")
    served, embedded = ENGINES["sglang"], ENGINES["embedded"]
    (told,) = check._check_kernels(served, demo_model_path())
    assert (told.severity, told.settings) == ("warning", ("rollout.engine",))
    assert "in torch and Triton, slower but right" in told.problem
    (finding,) = software_checks.check_sglang()
    assert (finding.verdict, told.problem in finding.what) == ("warning", True)
    assert list(check._check_kernels(embedded, demo_model_path())) == []
    save_hybrid(tmp_path / "hybrid", 0, 64)
    (refused,) = check._check_kernels(served, tmp_path / "hybrid")
    assert (refused.severity, refused.settings[0]) == ("error", "model.path")
    monkeypatch.setenv(VARIABLE, "on")
    assert list(check._check_kernels(served, demo_model_path())) == []
    (finding,) = software_checks.check_sglang()
    assert (finding.verdict, finding.what) == (
        "ok",
        "0.5.23; SGLang serves with its compiled kernels, which pass a self-test",
    )
    monkeypatch.setenv(VARIABLE, "maybe")
    assert [one.severity for one in check._check_kernels(served, None)] == ["error"]
    assert [one.verdict for one in software_checks.check_sglang()] == ["error"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cuda_graph_max_bs", "sglang.extra.cuda_graph_max_bs_decode or sglang.extra.cuda_graph_max_bs_prefill"),
        ("cuda_graph_backend", "sglang.extra.cuda_graph_backend_decode or sglang.extra.cuda_graph_backend_prefill"),
        ("atention_backend", "sglang.extra.attention_backend"),
    ],
)
def test_an_argument_that_may_mean_several_is_one_line(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_sglang = ("cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill", "attention_backend", "cuda_graph_config")
    known = frozenset((*of_sglang, "cuda_graph_backend_decode", "cuda_graph_backend_prefill"))
    monkeypatch.setattr(inputs, "server_arguments", lambda: known)
    config = load_config(["demo"], ["rollout.engine=sglang", f"sglang.extra={{{name}=64}}"])
    (told,) = inputs._passed_on(resolve(config))
    assert told.settings[0] == f"sglang.extra.{name}"
    assert told.remedy == f"did you mean {meant}?"


LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just("TENSOR"))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_tensors(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(with_tensors, value))
    return torch.zeros(1) if value == "TENSOR" else value


@settings(max_examples=50)
@given(args=st.lists(NESTED, max_size=3), kwargs=st.dictionaries(st.sampled_from("abc"), NESTED, max_size=2))
def test_a_tensor_that_reaches_a_placeholder_is_an_error(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Wherever it is in the arguments; without one, the placeholder of a decorator does nothing."""
    has_tensor = "TENSOR" in repr((args, kwargs))
    args, kwargs = with_tensors(args), with_tensors(kwargs)
    decorator, kernel = (v0_5_23._StubModule(name) for name in ("triton.jit", "sgl_kernel.rmsnorm"))
    for called in (decorator, decorator.Config):
        if has_tensor:
            with pytest.raises(RuntimeError, match=r"SGLang called triton\.jit.* computes nothing"):
                called(*args, **kwargs)
        else:
            called(*args, **kwargs)
    with pytest.raises(RuntimeError, match=r"SGLang called sgl_kernel\.rmsnorm, which is not installed here"):
        kernel(*args, **kwargs)
