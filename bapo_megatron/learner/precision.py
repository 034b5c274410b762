"""FP8, fusions and Transformer Engine: what they need, the layers to build, and Megatron's options.

What does not work is refused before a process starts, and again on each rank. The conditions come from Megatron-Core
0.16.1 (`transformer_config.py`, `fp8_utils.py`) and Transformer Engine 2.9 to 2.11 (`quantization.py`:
check_*_support; `utils.py`: assert_dim_for_fp8_exec, assert_dim_for_all_gather).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import packaging.version

from bapo_megatron.config.base import Violation
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, install_command
from bapo_megatron.hf.shape import ModelShape, entries
from bapo_megatron.hf.splits import is_trained

if TYPE_CHECKING:
    from bapo_megatron.algorithms.logprobs import Backend  # torch takes seconds to import; checks of settings need none

Version = tuple[int, ...]

_MAX_MASK_GIB = 1.0
_OLDEST_FLA = (0, 6)  # whose sources learner/linear_attention.py is written from, as in setup.py


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about a machine that layers depend on; None means absent.

    Example: Machine((9, 0), (12, 9), (2, 11, 0)) is a Hopper GPU, CUDA 12.9 and Transformer Engine 2.11.0.
    """

    compute_capability: tuple[int, int] | None = None
    cuda: Version | None = None
    transformer_engine: Version | None = None
    fla: Version | None = None  # flash-linear-attention


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to choose scales, and its requirements."""

    transformer_engine: Version  # the oldest that Megatron's get_fp8_recipe accepts
    dims_multiple: int  # for rows and columns of every matrix
    tokens_multiple: int  # for the tokens of a micro-batch on one rank
    gathered_multiple: int  # for the hidden size, if sequence parallelism gathers quantised activations


RECIPES = {
    "delayed": Recipe((1, 0), 16, 16, 16),
    "tensorwise": Recipe((2, 2), 16, 16, 16),
    # Transformer Engine pads the scales of blocks that are not full, but it does not pad what it gathers
    "blockwise": Recipe((2, 3), 16, 128, 128),
    "mxfp8": Recipe((2, 1), 32, 32, 32),
}


FUSED_ACTIVATIONS = ("silu",)  # values of ModelShape.activation; Megatron has no fused tanh gelu(gate) x up


def tokens_multiple(config: Config) -> int:
    """Return the number that must divide a pack's tokens on a rank (with sequence parallelism, on a tensor rank)."""
    return RECIPES[config.precision.recipe].tokens_multiple if config.precision.uses_fp8 else 1


def check_precision(config: Config, *, shape: ModelShape | None, machine: Machine | None) -> list[Violation]:
    """Find settings that cannot be used.

    Args:
        shape: the model's shape; None leaves its sizes unchecked.
        machine: the machine that runs it; None leaves hardware and packages unchecked.
    """
    found = [*_implementation(config, machine), *_masks(config, machine)]
    found += check_linear_attention("model.path", shape, machine)
    if config.precision.uses_fp8:
        found += _settings(config, shape)
        if shape is not None:
            found += _dimensions(config, shape)
        if machine is not None:
            found += _machine(config, machine)
    else:
        found += _idle(config)
    return found


def _implementation(config: Config, machine: Machine | None) -> Iterator[Violation]:
    implementation = config.model.implementation
    if implementation == "transformer_engine":
        if config.model.dtype != "bfloat16":
            yield Violation(
                ("model.dtype", "model.implementation"),
                'model.implementation="transformer_engine" needs model.dtype="bfloat16": its attention has no kernels '
                "for float32",
                'set that, or model.implementation="auto"',
            )
        if machine is not None and machine.compute_capability is None:
            yield Violation(
                ("model.implementation", "cluster.gpu"),
                'model.implementation="transformer_engine" needs a GPU',
                'set model.implementation="auto"',
            )
        elif machine is not None and machine.transformer_engine is None:
            yield Violation(
                ("model.implementation", "cluster.gpu"),
                'model.implementation="transformer_engine", but Transformer Engine is not installed',
                'run scripts/install_gpu.sh, or set model.implementation="auto"',
            )
    if implementation == "local" and config.precision.uses_fp8:
        yield Violation(
            ("model.implementation", "precision.fp8"),
            f'model.implementation="local" has no FP8, and precision.fp8="{config.precision.fp8}" asks for it',
            'set model.implementation="auto" or precision.fp8="off"',
        )


def _masks(config: Config, machine: Machine | None) -> Iterator[Violation]:
    """Refuse context parallelism of long sequences where our own attention, which keeps a mask in every layer, runs."""
    context, is_float32 = config.parallel.context, config.model.dtype == "float32"
    lacks_engine = machine is not None and machine.compute_capability is not None and not machine.transformer_engine
    is_own = is_float32 or lacks_engine or config.model.implementation == "local" or config.run.deterministic
    if context == 1 or not is_own:
        return
    longest = config.longest_trained
    mask_gib = longest / (2 * context) * longest * (4 if is_float32 else 2) / 2**30
    if mask_gib > _MAX_MASK_GIB:
        yield Violation(
            (
                "model.implementation",
                "model.dtype",
                "run.deterministic",
                "parallel.context",
                "data.max_prompt_tokens",
                "rollout.max_response_tokens",
                "environment",
            ),
            f"parallel.context={context} with sequences of {longest} tokens: layers without Transformer "
            f"Engine's attention would keep a mask of {mask_gib:.1f} GiB each",
            'set model.dtype="bfloat16", model.implementation="transformer_engine" and run.deterministic=false, or '
            "parallel.context=1",
        )


def check_linear_attention(model: str, shape: ModelShape | None, machine: Machine | None) -> Iterator[Violation]:
    """Refuse linear attention in plain torch on a GPU: it takes the chunks of a sequence one after the other.

    Args:
        model: the setting that names the model.
        shape, machine: see `check_precision`.
    """
    if shape is None or shape.linear is None or machine is None:
        return
    if machine.compute_capability is not None and (machine.fla is None or machine.fla < _OLDEST_FLA):
        installed = "" if machine.fla is None else f", and {_dotted(machine.fla) or 'an older one'} is installed"
        yield Violation(
            (model, "cluster.gpu"),
            f"{model} holds a {shape.family} model, whose linear attention needs flash-linear-attention "
            f"{_dotted(_OLDEST_FLA)} on a GPU{installed}",
            f"run {install_command('fla')}",
        )


def _idle(config: Config) -> Iterator[Violation]:
    if config.precision.fp8_params:
        yield Violation(
            ("precision.fp8_params", "precision.fp8"),
            'precision.fp8_params: nothing is FP8 with precision.fp8="off"',
            'set precision.fp8="hybrid", or leave it out',
        )


def _settings(config: Config, shape: ModelShape | None) -> Iterator[Violation]:
    p = config.precision
    if config.model.dtype != "bfloat16":
        yield Violation(
            ("model.dtype", "precision.fp8"),
            f'precision.fp8="{p.fp8}" needs model.dtype="bfloat16" for everything that is not FP8',
            'set that, or precision.fp8="off"',
        )
    if p.fp8_params and not config.optimizer.distributed:
        yield Violation(
            ("optimizer.distributed", "precision.fp8_params", "precision.fp8"),
            "precision.fp8_params=true needs optimizer.distributed=true: only the distributed optimizer of Megatron "
            "quantises its float32 weights after an update",
            "set that, or precision.fp8_params=false",
        )
    if p.fp8_params and p.recipe == "mxfp8":
        yield Violation(
            ("precision.fp8_params", "precision.recipe", "precision.fp8"),
            'precision.fp8_params=true is not supported with precision.recipe="mxfp8", whose parameters Megatron keeps '
            "in the gradients' buffer",
            "set precision.fp8_params=false",
        )
    if p.fp8_params and shape is not None and not all(map(is_trained, entries(shape))):
        yield Violation(
            ("precision.fp8_params", "model.family"),
            f"precision.fp8_params=true keeps weights in FP8 only where Adam has them in float32, and "
            f'model.family="{config.model.family}" does not train all of them',
            "set precision.fp8_params=false",
        )


def _dimensions(config: Config, shape: ModelShape) -> Iterator[Violation]:
    """Check that cuBLAS and the quantisers accept the sizes of the layers' matrices on one rank."""
    name, tensor = config.precision.recipe, config.parallel.tensor
    recipe = RECIPES[name]
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = [
        ("hidden_size", shape.hidden_size, 1),
        ("num_attention_heads x head_dim", query, tensor),
        ("(num_attention_heads + 2 x num_key_value_heads) x head_dim", query + 2 * key_value, tensor),
        *(("intermediate_size", size, tensor) for size in shape.ffn_sizes),
    ]
    settings = ("precision.recipe", "precision.fp8", "parallel.tensor", "model.path")
    for what, size, ranks in sizes:
        if size % (ranks * recipe.dims_multiple):
            per_rank = f" / parallel.tensor={ranks} = {size / ranks:g}" if ranks > 1 else ""
            yield Violation(
                settings,
                f'precision.recipe="{name}" needs multiples of {recipe.dims_multiple}, but {what} = {size}{per_rank}',
                _smaller(name, size, ranks),
            )
    sequence = config.parallel.sequence and tensor > 1
    if sequence and not shape.hidden_size % recipe.dims_multiple and shape.hidden_size % recipe.gathered_multiple:
        yield Violation(
            (*settings, "parallel.sequence"),
            f'precision.recipe="{name}" with parallel.sequence=true gathers quantised activations and needs a '
            f"hidden_size that is a multiple of {recipe.gathered_multiple}, but it is {shape.hidden_size}",
            'set parallel.sequence=false or precision.recipe="tensorwise"',
        )


def _smaller(recipe: str, size: int, ranks: int) -> str:
    """Suggest an alternative: a smaller tensor-parallel size, another recipe, or no FP8."""
    multiple = RECIPES[recipe].dims_multiple
    fitting = math.gcd(ranks, size // multiple) if size % multiple == 0 else 0
    if 0 < fitting < ranks:
        return f"set parallel.tensor={fitting}"
    if size % (16 * ranks) == 0:
        return 'set precision.recipe="tensorwise"'
    return 'set precision.fp8="off"'


def _machine(config: Config, machine: Machine) -> Iterator[Violation]:
    p, capability, engine = config.precision, machine.compute_capability, machine.transformer_engine
    if capability is None:
        problem = f'precision.fp8="{p.fp8}" needs a GPU'
        yield Violation(("precision.fp8", "cluster.gpu"), problem, 'set precision.fp8="off" on this machine')
        return
    facts = (capability, machine.cuda or (), engine or (math.inf,))
    settings = ("precision.recipe", "precision.fp8", "cluster.gpu")
    if reason := _hardware(p.recipe, *facts):
        instead = 'precision.fp8="off"' if _hardware("tensorwise", *facts) else 'precision.recipe="tensorwise"'
        yield Violation(settings, f'precision.recipe="{p.recipe}" {reason}', f"set {instead}")
    oldest = RECIPES[p.recipe].transformer_engine
    if engine is None:
        yield Violation(
            ("precision.fp8", "cluster.gpu"),
            f'precision.fp8="{p.fp8}" needs Transformer Engine',
            'run scripts/install_gpu.sh, or set precision.fp8="off"',
        )
    elif engine < oldest:
        yield Violation(
            settings,
            f'precision.recipe="{p.recipe}" needs Transformer Engine {_dotted(oldest)}, and {_dotted(engine)} is '
            "installed",
            "install a newer one",
        )


def _hardware(recipe: str, capability: tuple[int, int], cuda: Version, engine: tuple[float, ...]) -> str | None:
    """Return why a GPU or its CUDA cannot run a recipe (Transformer Engine's check_*_support), or None if they can."""
    this = f"this GPU has {_dotted(capability)}, with CUDA {_dotted(cuda) or 'unknown'}"
    if recipe in ("delayed", "tensorwise"):
        if capability < (8, 9):
            return f"needs compute capability 8.9 (Ada) or 9.0 (Hopper) and above; {this}"
        if capability < (9, 0) and cuda < (12, 1):
            return f"needs CUDA 12.1 on Ada; {this}"
    if recipe == "blockwise":
        if capability < (9, 0) or cuda < (12, 9):
            return f"needs compute capability 9.0 (Hopper) and above, and CUDA 12.9; {this}"
        if capability >= (10, 0) and engine < (2, 9):
            return f"needs Transformer Engine 2.9 on GPUs after Hopper; {this}"
    if recipe == "mxfp8" and not (10, 0) <= capability < (12, 0):
        return f"needs compute capability 10.x (data-centre Blackwell); {this}"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def this_machine() -> Machine:
    """Read what FP8 depends on: the current CUDA device, if any, and the installed packages."""
    import torch  # takes seconds to import, and most checks need only facts

    engine, fla = _installed("transformer_engine", "transformer_engine"), _installed("fla", "fla-core")
    if not torch.cuda.is_available():
        return Machine(transformer_engine=engine, fla=fla)
    cuda = version_numbers(torch.version.cuda or "")
    return Machine(torch.cuda.get_device_capability(), cuda, engine, fla)


def version_numbers(text: str) -> Version:
    """Parse the release numbers of a version: "2.11.0+abc" is (2, 11, 0); () if `text` is not a version."""
    try:
        return packaging.version.parse(text).release
    except packaging.version.InvalidVersion:
        return ()


def _installed(module: str, package: str) -> Version | None:
    """Return the version of a package, () if its module comes with another one, None without the module."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return version_numbers(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()


def check_machine(config: Config, shape: ModelShape, machine: Machine) -> None:
    """Check that this machine can compute what the settings ask for.

    Raises:
        ConfigError: it cannot compute `model.dtype`, `[precision]`, `model.implementation` or `train.logprob_backend`;
            says why.
    """
    found = [v.message for v in check_precision(config, shape=shape, machine=machine)]
    if config.model.dtype == "bfloat16" and machine.compute_capability is None:
        found.append('model.dtype="bfloat16" needs a GPU; set it to "float32" on this machine')
    if config.train.logprob_backend == "triton" and machine.compute_capability is None:
        found.append('train.logprob_backend="triton" needs a GPU; set train.logprob_backend="auto" on this machine')
    if found:
        raise ConfigError("; ".join(found))


def uses_transformer_engine(config: Config, machine: Machine) -> bool:
    """Return whether to build Transformer Engine's layers: bfloat16 on a GPU, if installed and not set to "local"."""
    if config.model.implementation == "local":
        return False
    has_it = machine.compute_capability is not None and machine.transformer_engine is not None
    return has_it and config.model.dtype == "bfloat16"


def logprob_backend(config: Config) -> Backend:
    """Return the backend that the settings ask for; "auto" means Triton on a GPU."""
    if config.train.logprob_backend == "auto":
        return "torch" if this_machine().compute_capability is None else "triton"
    return config.train.logprob_backend


def fusion_fields(config: Config, shape: ModelShape, machine: Machine) -> dict[str, bool]:
    """Return the fields of Megatron's TransformerConfig that choose fused kernels, on if GPU and packages allow it.

    bias_activation_fusion: SwiGLU as one compiled kernel, which keeps only its input for the backward pass.
    apply_rope_fusion: Transformer Engine's rotary embeddings.
    gradient_accumulation_fusion: the product's own kernel adds weight gradients to the float32 buffer; Transformer
    Engine's linears have one, Megatron's need Apex.
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
            "fp8_amax_compute_algo": "max",  # Megatron's default, "most_recent", leaves the history unused
        }
    return fields
