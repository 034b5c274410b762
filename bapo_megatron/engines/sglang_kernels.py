"""How SGLang serves on a GPU: with its compiled kernels, or slower, in torch and Triton.

SGLang's kernels (the package sgl_kernel) and its radix tree in Rust are compiled for the torch that SGLang pins. With
another one they may not load, or misread tensors. So a new process tries the kernels first. If they fail, the server
replaces them (patches/sglang), which works for dense models.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from bapo_megatron.errors import UserError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.runtime import run_python

VARIABLE = "BAPO_SGLANG_KERNELS"
REMEDY = "scripts/install_gpu.sh installs the torch and the kernels that SGLang pins"
_SELF_TEST = "import sys; from bapo_megatron.engines.sglang_kernels import self_test; self_test(sys.argv[1])"
_SELF_TEST_TIMEOUT_S = 180.0  # it imports torch and loads a library of up to a gigabyte
_NEAR = 0.02  # bfloat16 has 8 bits
_CUT = 300  # characters of a foreign error

# What SGLang 0.5.23 imports from sgl_kernel to serve a dense model, by the module below `sglang` that does.
NAMES = {
    "srt/layers/activation.py": ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"),
    "srt/layers/layernorm.py": ("rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm"),
    "srt/layers/sampler.py": ("top_k_renorm_prob", "top_p_renorm_prob"),
    "srt/model_executor/runner_backend_utils/weak_ref_tensor.py": ("weak_ref_tensor",),
    "srt/layers/attention/triton_backend.py": ("utils.is_arch_support_pdl",),
}


@dataclass(frozen=True, slots=True)
class Serving:
    """What SGLang has on this machine: whether its kernels work, and whether the torch is its own."""

    on_gpu: bool
    problem: str = ""  # why the kernels are not used; "" without a GPU, and if they work
    foreign: str = ""  # example: "torch 2.11.0 instead of 2.14.1"; "" if the torch is SGLang's own

    @property
    def is_usual(self) -> bool:
        """Whether SGLang runs as it is."""
        return not (self.on_gpu and (self.problem or self.foreign))

    @property
    def line(self) -> str:
        """What happens, in one line."""
        if self.problem:
            return f"SGLang serves dense models in torch and Triton, slower but right: no kernels, {self.problem}"
        with_torch = f", with {self.foreign}: attention and sampling in Triton and torch" if self.foreign else ""
        return f"SGLang serves with its compiled kernels, which pass a self-test{with_torch}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that servers need; a variable that you set yourself keeps its value."""
        rust = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"} if self.foreign else {}
        skip = {} if self.is_usual else {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
        return rust | skip | ({"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"} if self.problem else {})

    @property
    def arguments(self) -> list[str]:
        """Arguments of a server, to be put first, so that later ones win.

        What SGLang chooses by itself, fa3 and FlashInfer, is compiled for its own torch, too.
        """
        if self.is_usual:
            return []
        chosen = "--attention-backend triton --sampling-backend pytorch --grammar-backend none"
        return [*chosen.split(), *(["--disable-prefill-cuda-graph"] if self.problem else [])]

    def refusal(self, model_path: Path) -> str:
        """Say why this model cannot be served here; "" if it can be, or if the model is of a family of the user's."""
        if not self.problem:
            return ""
        try:
            shape = ModelFacts.of(model_path).shape
        except UserError:
            return ""
        if shape.experts is None and all(layer.linear is None for layer in shape.layers):
            return ""
        kind = "linear attention" if shape.experts is None else "a mixture of experts"
        return (
            f"{model_path} has {kind}, which SGLang computes with compiled kernels only, and they are not used here: "
            f"{self.problem}; {REMEDY}, or train a dense model"
        )


def choose() -> Serving:
    """Find out how SGLang serves here, once: processes that this one starts find the answer in a variable.

    Raises:
        UserError: the variable is neither "on" nor "off", which may be followed by a reason ("off: too old").
    """
    import torch

    foreign = _foreign_torch(torch.__version__)
    if not torch.cuda.is_available():
        return Serving(on_gpu=False, foreign=foreign)
    decided = os.environ.get(VARIABLE)
    word, _, why = (decided or "").partition(": ")
    if decided is not None and decided != "on" and word != "off":
        raise UserError(f'{VARIABLE} must be "on" or "off", or unset, got {decided!r}')
    if decided is None:
        problem = kernels_problem("cuda")
        os.environ[VARIABLE] = f"off: {problem}" if problem else "on"
    else:
        problem = (why or f"{VARIABLE}=off") if word == "off" else ""
    return Serving(on_gpu=True, problem=problem, foreign=foreign)


def kernels_problem(device: str) -> str:
    """Say why SGLang's kernels cannot be used on a device, in one line; a new process tries them. "" if they can."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return "sgl_kernel is not installed"
    problem = run_python(_SELF_TEST, device, timeout_s=_SELF_TEST_TIMEOUT_S)[1]
    return f"sgl_kernel cannot be used: {problem[:_CUT]}" if problem else ""


def self_test(device: str) -> None:
    """Compute with three of SGLang's kernels, and look for all that a dense model needs.

    Raises:
        ImportError, OSError, RuntimeError: the library does not load, a kernel is missing, or a result is wrong.
    """
    import torch  # first, as in a server
    from torch.nn.functional import rms_norm, silu

    sgl_kernel = importlib.import_module("sgl_kernel")
    for name in (name for names in NAMES.values() for name in names):
        module, _, function = name.rpartition(".")
        owner = importlib.import_module(f"sgl_kernel.{module}") if module else sgl_kernel
        if not hasattr(owner, function):
            raise ImportError(f"it has no {name}: another version than SGLang's?")
    torch.manual_seed(0)
    x_TH, residual_TH = torch.randn(2, 5, 256).to(device, torch.bfloat16)
    weight_H = torch.rand(256).to(device, torch.bfloat16)
    sum_TH = x_TH + residual_TH
    expected = {
        "rmsnorm": rms_norm(x_TH.float(), (256,), weight_H.float(), 1e-6),
        "fused_add_rmsnorm": rms_norm(sum_TH.float(), (256,), weight_H.float(), 1e-6),
        "silu_and_mul": silu(x_TH.float()[:, :128]) * x_TH.float()[:, 128:],
    }
    found = {"rmsnorm": sgl_kernel.rmsnorm(x_TH, weight_H, 1e-6), "silu_and_mul": x_TH.new_full((5, 128), torch.nan)}
    sgl_kernel.silu_and_mul(x_TH, found["silu_and_mul"])
    sgl_kernel.fused_add_rmsnorm(x_TH, residual_TH, weight_H, 1e-6)  # in place
    found["fused_add_rmsnorm"] = x_TH
    for name, result in expected.items():
        if not torch.allclose(found[name].float(), result, rtol=_NEAR, atol=_NEAR):
            raise RuntimeError(f"its {name} computes something else than torch")


def _foreign_torch(installed: str) -> str:
    """Say that the torch is not the one that SGLang pins, apart from patches and builds; "" if it is."""
    try:
        requirements = importlib.metadata.requires("sglang") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    pins = [match[1] for text in requirements if (match := re.fullmatch(r"torch==([\d.]+)", text))]
    mine = installed.partition("+")[0]
    is_own = any(pin.split(".")[:2] == mine.split(".")[:2] for pin in pins)
    return "" if is_own or not pins else f"torch {mine} instead of {pins[0]}"
