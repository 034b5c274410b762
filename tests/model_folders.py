"""Folders whose config.json is written as people write it: both spellings, absent, null, contradicting, each type.

`written(number)` returns the config.json of a case, the same on every machine. `meaning` says what transformers and we
make of it.
"""

import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.reader import SINGLE
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.resolved import resolve
from tests.hf_models import randomise, stack_experts

NUM_TOKENS = 48
TOLERANCE = 1e-4  # in log-probs; transformers' own float32 is up to 3e-5 away from its float64
VOCAB_SIZE = 37
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "granite": {"attention_multiplier": 0.5},
    "llama": {},
    "mistral": {"sliding_window": None},
    "olmo2": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "qwen3_5_text": _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_moe_text": _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 10},
    "qwen3_5_moe": _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 10},
    "smollm3": {"pad_token_id": None},  # its default is beyond this vocabulary
}
ABSENT = object()
_OTHERS: dict[str, dict[str, list[Any]]] = {  # values that people write, besides those about positions
    "": {
        "rms_norm_eps": [ABSENT, 1e-5, 1e-5, 1e-2, None],
        "tie_word_embeddings": [ABSENT, True, True, False, None],
        "torch_dtype": ["bfloat16", "float32"],
        "attention_dropout": [0.0, 0.1],
        "layer_types": [ABSENT, None, ["full_attention"] * 2, ["full_attention"], ["sliding_attention"] * 2],
        "per_layer_config": [None, None, None, {"1": {"intermediate_size": 24}}],
        "num_hidden_layers": [3],
    },
    "gemma": {
        "hidden_act": [ABSENT, "gelu", "gelu_pytorch_tanh", "gelu_new", "silu", None],
        "hidden_activation": [ABSENT, None, "gelu_pytorch_tanh", "gelu"],
        "num_key_value_heads": [1, 4, None],
        "head_dim": [8, None],
        "attention_bias": [ABSENT, True, False, None],
        "use_bidirectional_attention": [None, False, True],
    },
    "granite": {
        "num_key_value_heads": [ABSENT, None, 4],
        "head_dim": [ABSENT, 8, None],
        "attention_bias": [ABSENT, True],
        "mlp_bias": [ABSENT, True],
        "embedding_multiplier": [ABSENT, 12, 1.5, 0, "12"],
        "attention_multiplier": [ABSENT, 0.25, None],
        "residual_multiplier": [ABSENT, 0.22, -1.0],
        "logits_scaling": [ABSENT, 8, 0.0],
    },
    "olmo2": {
        "num_key_value_heads": [ABSENT, None, 4],
        "head_dim": [ABSENT, None, 8],
        "attention_bias": [ABSENT, True, False, None],
    },
    "smollm3": {
        "num_key_value_heads": [ABSENT, None, 1, 4],
        "head_dim": [ABSENT, 8, None],
        "attention_bias": [ABSENT, True],
        "mlp_bias": [ABSENT, True],
        "no_rope_layers": [ABSENT, None, [0, 1], [1, 1], [0, 0], [1], "1"],
        "no_rope_layer_interval": [ABSENT, 1, 2, 3, 0, None],
        "use_sliding_window": [ABSENT, False, True],
        "sliding_window": [ABSENT, None, 16],
    },
    "llama": {
        "hidden_act": [ABSENT, "silu", "gelu_pytorch_tanh", "gelu", "swish"],
        "num_key_value_heads": [ABSENT, None, 1, 4],
        "head_dim": [ABSENT, None, 8],
        "attention_bias": [ABSENT, True, False, None, "false"],
        "mlp_bias": [ABSENT, True, False, None],
        "use_sliding_window": [True],
        "text_config": [{"hidden_size": 64}],
    },
    "mistral": {
        "num_key_value_heads": [None, 4],
        "head_dim": [ABSENT, None, 8],
        "sliding_window": [ABSENT, 16, None, 0],
        "attention_bias": [True],
    },
    "qwen2": {
        "num_key_value_heads": [None, 4],
        "head_dim": [ABSENT, None, 8],
        "use_sliding_window": [ABSENT, False, True, None],
        "sliding_window": [ABSENT, None, 16],
        "max_window_layers": [ABSENT, 0, 2, None],
        "attention_bias": [False],
    },
    "qwen3": {
        "num_key_value_heads": [None, 4],
        "head_dim": [8, None],
        "attention_bias": [ABSENT, True, None],
        "use_sliding_window": [ABSENT, False, True],
        "sliding_window": [ABSENT, None, 16],
        "max_window_layers": [ABSENT, 0, 2],
    },
    "qwen3_moe": {
        "num_key_value_heads": [4, None],
        "head_dim": [ABSENT, 8, None],
        "norm_topk_prob": [ABSENT, True, False, None],
        "num_local_experts": [4, 3, None],
        "mlp_only_layers": [ABSENT, None, [], [0]],
        "decoder_sparse_step": [ABSENT, 1, 2],
        "use_sliding_window": [ABSENT, False, True],
        "attention_bias": [True],
    },
    "qwen3_5_text": {
        "num_key_value_heads": [4, None],
        "head_dim": [8, None],
        "hidden_act": [ABSENT, "silu"],
        "layer_types": [ABSENT, ["linear_attention", "full_attention"], ["full_attention"] * 2],
        "full_attention_interval": [1, 2, None],
    },
}
_OTHERS["qwen3_5"] = _OTHERS["qwen3_5_text"]
_OTHERS["qwen3_5_moe_text"] = _OTHERS["qwen3_5_moe"] = _OTHERS["qwen3_5_text"] | {
    "num_experts": [ABSENT, 6, None],
    "num_experts_per_tok": [1, 4, 5],
    "shared_expert_intermediate_size": [ABSENT, 12, 0, None],
    "norm_topk_prob": [ABSENT, True, False, None],
    "num_local_experts": [4, 3, None],
    "mlp_only_layers": [None, [], [0]],
    "decoder_sparse_step": [1, 2],
}
_WITH_VISION = ("qwen3_5", "qwen3_5_moe")


def written(number: int) -> dict[str, Any]:
    """Return the config.json of case `number`."""
    draw = random.Random(number)
    model_type = draw.choice(list(_FAMILIES))
    is_hybrid = model_type.startswith("qwen3_5")
    config = _SIZES | _FAMILIES[model_type]
    if model_type == "qwen2" and draw.random() < 0.8:
        del config["head_dim"]
    config["max_position_embeddings"] = draw.choice([64, 128, 256])
    config |= _positions(draw, is_hybrid)
    others = (_OTHERS[""] | _OTHERS[model_type]).items()
    for key, values in draw.sample(list(others), draw.choice([0, 1, 1, 2, 3])):
        config[key] = draw.choice(values)
    config = {key: value for key, value in config.items() if value is not ABSENT}
    if model_type not in _WITH_VISION:
        return {"model_type": model_type} | config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    stray = draw.choice([{}, {}, {}, {"rms_norm_eps": 0.1}, _positions(draw, is_hybrid), {"hidden_size": 64}])
    return {"model_type": model_type, **tied, **stray, "text_config": {"model_type": f"{model_type}_text"} | config}


def _positions(draw: random.Random, is_hybrid: bool) -> dict[str, Any]:
    """Return keys about positions, in one of the ways in which files spell them."""
    config: dict[str, Any] = {}
    new, old = _rope(draw, is_hybrid), _rope(draw, is_hybrid)
    match draw.choice(["new", "new", "old", "old", "both", "card", "empty", "none"]):
        case "new":
            config = {"rope_parameters": new, "rope_scaling": draw.choice([ABSENT, ABSENT, None, {}])}
        case "old":
            config = {"rope_scaling": old, "rope_parameters": draw.choice([ABSENT, ABSENT, None, {}])}
        case "both":
            config = {"rope_parameters": new, "rope_scaling": draw.choice([old, new])}
        case "card":  # transformers 5 wrote the file, and the user added what a model card tells
            plain = {"rope_type": "default", "rope_theta": draw.choice([1e4, 1e4, 1e6])}
            config = {"rope_parameters": plain, "rope_scaling": old}
        case "empty":
            config = {"rope_parameters": draw.choice([None, {}]), "rope_scaling": draw.choice([None, {}])}
    if draw.random() < 0.5:
        config["rope_theta"] = draw.choice([1e4, 1e6, 1e6, 5000, 5000, None])
    if draw.random() < 0.15:
        config["original_max_position_embeddings"] = draw.choice([16, 32, 64, None])
    if draw.random() < (0.4 if is_hybrid else 0.05):
        config["partial_rotary_factor"] = draw.choice([0.25, 0.5, 1.0, None])
    return {key: value for key, value in config.items() if value is not ABSENT}


def _rope(draw: random.Random, is_hybrid: bool) -> dict[str, Any]:
    kinds = ["default", "linear", "llama3", "yarn", "yarn", "yarn"]
    kind = draw.choice([*kinds, *kinds, *kinds, "dynamic", "longrope", "su", None])
    rope: dict[str, Any] = {draw.choice(["rope_type", "rope_type", "type"]): kind}
    if draw.random() < 0.1:
        rope |= {"type": draw.choice(["linear", "yarn"])}
    if draw.random() < 0.05:
        rope = {}
    if kind not in ("default", None):
        rope["factor"] = draw.choice([2.0, 4.0, 8, 1.0, 0.5, None, ABSENT] if draw.random() < 0.2 else [2.0, 4.0])
    if kind == "llama3":
        rope |= {"low_freq_factor": draw.choice([1.0, 2]), "high_freq_factor": draw.choice([4.0, 8])}
    if kind in ("llama3", "yarn", "longrope") and draw.random() < 0.7:
        rope["original_max_position_embeddings"] = draw.choice([16, 32, 64])
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    if kind == "yarn":
        options = {
            "attention_factor": [1.0, 0.7, 1.5, None],
            "beta_fast": [16, 32.0, None],
            "beta_slow": [1, 2.0, None],
            "mscale": [0.707, 1.0, None],
            "mscale_all_dim": [0.707, 1.0, None],
            "truncate": [True, False],
        }
        rope |= {key: draw.choice(values) for key, values in options.items() if draw.random() < 0.2}
    if draw.random() < 0.6:
        rope["rope_theta"] = draw.choice([1e4, 1e4, 1e6, 5000])
    if draw.random() < (0.5 if is_hybrid else 0.05):
        rope["partial_rotary_factor"] = draw.choice([0.25, 0.5, 1.0])
    if is_hybrid and draw.random() < 0.3:
        rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    return {key: value for key, value in rope.items() if value is not ABSENT}


@dataclass(frozen=True)
class Meaning:
    """What a config.json means: log-probs [NUM_TOKENS - 1] of random tokens, or who refuses it."""

    theirs: Tensor | None  # None if transformers cannot load it
    ours: Tensor | None
    refusal: str  # our words

    @property
    def difference(self) -> float:
        """Largest difference of log-probs; infinite if we accept what transformers cannot load, 0 if we refuse."""
        if self.ours is None:
            return 0.0
        return float("inf") if self.theirs is None else float((self.ours - self.theirs).abs().max())


def meaning(config: dict[str, Any], folder: Path, ours: Callable[[Path, Tensor], Tensor]) -> Meaning:
    """Ask transformers and us; `folder` holds the model afterwards, if both take it.

    Args:
        ours: computes log-probs, from the folder and token ids.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    refusal = ""
    try:
        shape = model_shape(load_hf_config(folder), folder)
    except CheckpointError as error:
        refusal = str(error)
    try:
        text = transformers.AutoConfig.from_pretrained(folder).get_text_config()
        model = transformers.AutoModelForCausalLM.from_config(text, dtype=torch.float32).eval()
    except Exception:
        return Meaning(None, None if refusal else torch.zeros(0), refusal)
    if text.model_type in ("qwen3_moe", "qwen3_5_moe_text"):
        model.set_experts_implementation("eager")  # the other one wants sizes that 4 divides
    torch.manual_seed(5)
    randomise(model)
    ids = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    try:
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].float()
    except Exception:
        return Meaning(None, None if refusal else torch.zeros(0), refusal)
    theirs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    if refusal:
        return Meaning(theirs, None, refusal)
    _save(model, folder, shape.prefix)
    (folder / "config.json").write_text(json.dumps(config))
    return Meaning(theirs, ours(folder, ids), "")


def _save(model: transformers.PreTrainedModel, folder: Path, prefix: str) -> None:
    model.save_pretrained(folder)
    if prefix != "model.":
        if any(".experts." in name for name in model.state_dict()):
            stack_experts(model, folder)  # as published
        named = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(folder / SINGLE).items()}
        save_file(named, folder / SINGLE, metadata={"format": "pt"})


def embedded(folder: Path, ids_T: Tensor) -> Tensor:
    """Compute the log-probs of ids_T[1:] with the embedded engine."""
    model = Model.from_pretrained(folder, max_len=len(ids_T), dtype=torch.float32)
    with torch.inference_mode():
        return model.score(ids_T, 1, 1)[0].float()


def learned(folder: Path, ids_T: Tensor) -> Tensor:
    """Compute the log-probs of ids_T[1:] with the learner; needs a process group of one rank."""
    from megatron.core import parallel_state

    from bapo_megatron.learner.megatron import MegatronLearner
    from tests.integration.hf_roundtrip import make_config, packed

    learner = MegatronLearner(resolve(make_config({}).model_copy(update={"rollout": RolloutConfig()}), folder))
    (log_probs_R,) = learner.log_probs(packed([ids_T]))
    parallel_state.destroy_model_parallel()
    return log_probs_R.float()


def engine_and_learner(folder: Path, ids_T: Tensor) -> Tensor:
    """Compute log-probs as `embedded` and `learned` do, [2, T - 1]."""
    return torch.stack((embedded(folder, ids_T), learned(folder, ids_T)))


def compare(numbers: Iterable[int], folder: Path, ours: Callable[[Path, Tensor], Tensor]) -> Counter[str]:
    """Count the cases by outcome: equal, refused (alone, or as transformers does), mismatched.

    Raises:
        AssertionError: a case is mismatched.
    """
    outcomes: Counter[str] = Counter()
    for number in numbers:
        config = written(number)
        found = meaning(config, folder, ours)
        assert found.difference < TOLERANCE, f"case {number} is off by {found.difference}: {json.dumps(config)}"
        if found.ours is not None:
            outcomes["equal"] += 1
        else:
            assert len(found.refusal.splitlines()) == 1, f"case {number}: {found.refusal}"
            outcomes["refused alone" if found.theirs is not None else "refused by both"] += 1
    return outcomes


def compare_in_rank(rank: int, world_size: int, folder: Path, num_cases: int, result: Path) -> None:
    """Compare the first cases with engine and learner; write the counts to `result`, as JSON."""
    transformers.logging.set_verbosity(100)
    transformers.utils.logging.disable_progress_bar()
    result.write_text(json.dumps(compare(range(num_cases), folder, engine_and_learner)))


if __name__ == "__main__":  # python -m tests.model_folders NUMBER
    from tests.distributed import run_distributed

    with tempfile.TemporaryDirectory() as scratch:
        parts = Path(scratch)
        run_distributed(compare_in_rank, 1, parts / "model", int(sys.argv[1]), parts / "result", timeout_s=7200.0)
        print((parts / "result").read_text())
