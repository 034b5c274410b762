"""Checks of the model: its family, its split over ranks and servers, its longest sequence, its precision.

learner/fit.py and learner/precision.py refuse what the trainer cannot do.
"""

from collections.abc import Iterator

from bapo_megatron.config.base import Severity, Violation, warning
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import sglang
from bapo_megatron.hf.shape import Dense, ModelShape
from bapo_megatron.learner.fit import check_adapters, check_extra, check_replay, check_split
from bapo_megatron.preflight.checks.eval import EVALUATES
from bapo_megatron.preflight.checks.layout import divisors
from bapo_megatron.resolved import Resolved

_SERVED_BY_TRANSFORMERS = ("smollm3",)  # families that SGLang has no class for


def check_policy(run: Resolved) -> Iterator[Violation]:
    """Check the model against its family, the layout, the servers and the longest sequence."""
    config, own, model = run.config, run.own, run.model
    assert model is not None
    model_type = model.hf_config.get("model_type")
    if own is not None and own.model_type != model_type:
        yield Violation(
            ("model.family", "model.path"),
            f'model.family="{config.model.family}" is for model_type {own.model_type!r}, and the config.json of '
            f"model.path={config.model.path!r} has {model_type!r}",
            "leave model.family out, or set model.path to a model of that type",
        )
        return
    yield from check_extra(config)
    yield from check_split(config, model, "model.path")
    yield from check_replay(config, model)
    yield from check_adapters(config, model)
    if model.problems:
        return
    shape = model.shape
    if config.rollout.engine == "sglang" and shape.activation != "silu":
        yield Violation(
            ("rollout.engine", "model.path"),
            f'rollout.engine="sglang" does not compute the activation of model.path: the model has {shape.activation}, '
            "but SGLang computes the exact GELU for gemma, whatever config.json says, and SiLU for the other families",
            'set rollout.engine="embedded"',
        )
    if config.rollout.engine == "sglang" and own is not None and not sglang.knows(own.model_type):
        yield Violation(
            ("rollout.engine", "model.family"),
            f'rollout.engine="sglang" does not serve model.family="{config.model.family}": neither SGLang nor '
            f"transformers knows model_type {own.model_type!r}",
            'set rollout.engine="embedded"',
        )
    yield from _of_servers(config.rollout.server_tensor_parallel, shape)
    if config.train.share_prompts and shape.linear is not None:
        yield warning(
            ("train.share_prompts", "model.path"),
            "train.share_prompts=true has no effect with linear attention: each response would need a copy of "
            "the state after the prompt",
            "leave it out",
        )
    positions = shape.max_positions
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = config.longest_sequence - config.environment.max_given_tokens  # checks/environment.py adds its answers
    settings = ("data.max_prompt_tokens", "rollout.max_response_tokens", "model.path")
    if prompt + response > positions:
        fitting = positions - response if response < positions else positions // 2
        advice = f"set data.max_prompt_tokens={fitting}"
        if response >= positions:
            advice += f" and rollout.max_response_tokens={positions - fitting}"
        yield Violation(
            settings,
            f"data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} = {prompt + response} is "
            f"more than the model's max_position_embeddings={positions}",
            advice + _longer(shape, prompt + response),
        )
    elif longest > positions:
        yield Violation(
            (*EVALUATES, *settings),
            f"data.max_prompt_tokens + the longest max_response_tokens of eval.sets = {longest} is "
            f"more than the model's max_position_embeddings={positions}",
            f"set max_response_tokens={positions - prompt} there" + _longer(shape, longest),
        )


def check_sharing_too(setting: str, path: str | None, shape: ModelShape) -> Iterator[Violation]:
    """Warn of a frozen model that computes each copy of a prompt, next to a policy that computes a prompt once."""
    if shape.linear is not None:
        yield warning(
            (setting, "train.share_prompts", "model.path"),
            f"{setting}={path!r} has linear attention: its passes take longer, because it computes a prompt once for "
            "each response, and the policy once for all",
            "set it to a model without linear attention to save that time",
        )


def _of_servers(ranks: int, shape: ModelShape) -> Iterator[Violation]:
    """Check that a server's ranks can share heads and feed-forward rows.

    SGLang gives several ranks the same key-value head if there are more ranks; transformers' modules do not.
    """
    sizes = {"num_attention_heads": shape.num_heads}
    if shape.linear is not None:
        sizes["linear_num_key_heads"] = shape.linear.num_key_heads
    if isinstance(mlp := shape.layers[0].mlp, Dense):
        sizes["intermediate_size"] = mlp.ffn_size
    keys = shape.num_kv_heads

    def copies(n: int) -> bool:
        return n % keys == 0 and shape.family not in _SERVED_BY_TRANSFORMERS

    def undivided(n: int) -> list[str]:
        found = [f"{key}={size}" for key, size in sizes.items() if size % n]
        return found if keys % n == 0 or copies(n) else [*found, f"num_key_value_heads={keys}"]

    if bad := undivided(ranks):
        fitting = [n for n in divisors(shape.num_heads) if not undivided(n)]
        works = min(fitting, key=lambda n: (abs(n - ranks), n))
        yield Violation(
            ("rollout.server_tensor_parallel", "model.path"),
            f"rollout.server_tensor_parallel={ranks} does not divide the model's {', '.join(bad)}",
            f"set rollout.server_tensor_parallel={works}",
        )


def _longer(shape: ModelShape, num_tokens: int) -> str:
    """Say how config.json allows `num_tokens` positions, if its YaRN is made for them; otherwise return nothing."""
    rope, key = shape.rope, "original_max_position_embeddings"
    if rope["rope_type"] != "yarn" or num_tokens > (meant := int(rope["factor"] * rope.get(key, shape.max_positions))):
        return ""
    kept = "" if key in rope else f' and, next to the factor, "{key}": {shape.max_positions}'
    return (
        f', or set "max_position_embeddings": {meant}{kept} in config.json: its YaRN is made for that length, '
        "and its frequencies do not change"
    )


def check_dtype(config: Config, num_gpus: int, *, starts_here: bool) -> Iterator[Violation]:
    """Check that there is a GPU for bfloat16, and no float32 for SGLang's kernels.

    bfloat16 is an error if the run starts here, otherwise a warning.
    """
    if config.model.dtype == "bfloat16" and not num_gpus:
        problem, remedy = 'model.dtype="bfloat16" needs a GPU, and none is visible here', 'set it to "float32" on CPUs'
        severity: Severity = "error" if starts_here else "warning"
        yield Violation(("model.dtype", "cluster.gpu"), problem, remedy, severity)
    if num_gpus or config.cluster.gpu is not None:
        yield from check_server_dtype(config)


def check_server_dtype(config: Config) -> Iterator[Violation]:
    """Check that there is no float32 for SGLang's kernels on GPUs."""
    if (
        config.model.dtype == "float32"
        and config.rollout.engine == "sglang"
        and "attention_backend" not in config.sglang.extra
    ):
        yield Violation(
            ("model.dtype", "rollout.engine", "sglang.extra", "cluster.gpu"),
            'model.dtype="float32" with rollout.engine="sglang" on GPUs: the attention that SGLang chooses there has '
            "no kernels for float32",
            'set model.dtype="bfloat16"',
        )


def precision_warnings(run: Resolved, num_gpus: int) -> Iterator[Violation]:
    """Warn of FP8 settings and a log-prob backend that need a GPU or care.

    Args:
        num_gpus: GPUs that a run may use.
    """
    config, p = run.config, run.config.precision
    if not num_gpus and p.uses_fp8:
        yield warning(
            ("precision.fp8", "precision.recipe", "cluster.gpu"),
            f'precision.fp8="{p.fp8}" needs a GPU, and none is visible here: whether GPU, CUDA and Transformer Engine '
            f'are fit for precision.recipe="{p.recipe}" is checked where the run starts',
        )
    if p.uses_fp8 and run.placement.num_servers and not run.engine.on_gpus:
        yield warning(
            ("rollout.engine", "precision.fp8"),
            f'precision.fp8="{p.fp8}" with rollout.engine="{config.rollout.engine}": that engine samples on a CPU, '
            "from bfloat16 weights",
            'set rollout.engine="sglang"',
        )
    if p.uses_fp8 and p.recipe == "delayed":
        yield warning(
            ("precision.recipe", "precision.fp8"),
            'precision.recipe="delayed" starts with scales of 1, learns them from training passes, and does not save '
            "them in checkpoints: after each start, log-probs are coarse until the first update",
            'set precision.recipe="tensorwise"',
        )
    if not num_gpus and config.train.logprob_backend == "triton":
        yield warning(
            ("train.logprob_backend", "cluster.gpu"),
            'train.logprob_backend="triton" needs a GPU, and none is visible here',
            'set it to "auto"',
        )
