"""FP8, fusions and Transformer Engine: the layers to build, and Megatron's options.

Pure functions in `config/precision.py` decide what is refused, and why. Written against Megatron-Core 0.16.1 and
Transformer Engine 2.9 to 2.11.
"""

import importlib.util
from typing import Any

from bapo_megatron.algorithms.logprobs import Backend
from bapo_megatron.config.precision import FUSED_ACTIVATIONS, Machine, check_precision
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import ModelShape


def check_machine(config: Config, shape: ModelShape, machine: Machine) -> None:
    """Check that this machine can compute what the settings ask for.

    Raises:
        ConfigError: it cannot, because of `[precision]`, `model.implementation` or `train.logprob_backend`; says why.
    """
    found = [v.message for v in check_precision(config, shape=shape, machine=machine)]
    if config.train.logprob_backend == "triton" and machine.compute_capability is None:
        found.append('train.logprob_backend="triton" needs a GPU; set train.logprob_backend="auto" on this machine')
    if found:
        raise ConfigError("; ".join(found))


def uses_transformer_engine(config: Config, machine: Machine) -> bool:
    """Return whether layers are Transformer Engine's: for bfloat16, on a GPU, if installed and not set to "local"."""
    if config.model.implementation == "local":
        return False
    has_it = machine.compute_capability is not None and machine.transformer_engine is not None
    return has_it and config.model.dtype == "bfloat16"


def logprob_backend(config: Config) -> Backend:
    """Return the backend that the settings ask for; "auto" is torch."""
    return "triton" if config.train.logprob_backend == "triton" else "torch"


def fusion_fields(config: Config, shape: ModelShape, machine: Machine) -> dict[str, bool]:
    """Return the fields of Megatron's TransformerConfig that choose fused kernels, for which GPU and packages suffice.

    bias_activation_fusion: SwiGLU as one compiled kernel, which keeps its input alone for the backward pass.
    apply_rope_fusion: Transformer Engine's rotary embeddings.
    gradient_accumulation_fusion: weight gradients added to the float32 buffer by the product's own kernel, of
    Transformer Engine's linears, or of Apex for Megatron's.
    """
    on_gpu = machine.compute_capability is not None
    has_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "bias_activation_fusion": on_gpu and shape.activation in FUSED_ACTIVATIONS,
        "apply_rope_fusion": on_gpu and machine.transformer_engine is not None,
        "gradient_accumulation_fusion": uses_transformer_engine(config, machine) or (on_gpu and has_apex),
    }


def fp8_fields(config: Config, fp8_params: bool = False) -> dict[str, Any]:
    """Return the FP8 fields of Megatron's TransformerConfig; none without FP8."""
    p = config.precision
    if not p.uses_fp8:
        return {}
    fields: dict[str, Any] = {"fp8": p.fp8, "fp8_recipe": p.recipe, "fp8_param": fp8_params}
    if p.recipe == "delayed":
        fields |= {
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",  # Megatron's default, the most recent, leaves the history unused
        }
    return fields
