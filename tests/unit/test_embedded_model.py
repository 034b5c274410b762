"""The embedded engine's model against transformers, its sampler's random numbers, and the checks of the client."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from bapo_megatron.engines.base import GenerateRequest, VersionSpan
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.sampler import uniform
from bapo_megatron.engines.replies import parse_reply
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.errors import CheckpointError
from studies.bfloat16 import RoundedModel

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"head_dim": 16, "moe_intermediate_size": 32}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "yarn": Qwen3Config(**SIZES, head_dim=8, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma-untied-bias": GemmaConfig(**SIZES, head_dim=16, tie_word_embeddings=False, attention_bias=True),
    "mixture": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    "mixture-plain-shares": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=6, num_experts_per_tok=2),
    "mixture-of-one": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=6, num_experts_per_tok=1, attention_bias=True),
    "hybrid": Qwen3_5TextConfig(
        **SIZES | {"initializer_range": 0.05},  # with larger weights, transformers itself rounds by more
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    ),
    "mha": LlamaConfig(**SIZES | {"num_key_value_heads": 6}, head_dim=12),
}


def save(config: Any, folder: Path, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that norms and biases are not just ones and zeros
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_append_and_decode_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save(CONFIGS[name], tmp_path)
    model = Model.from_pretrained(tmp_path, max_len=128)
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 50, 1, 33]
    sequences = [torch.randint(0, 61, (n + 20,), generator=generator) for n in lengths]
    with torch.no_grad():
        expected = [torch.log_softmax(reference(s[None]).logits[0], -1) for s in sequences]
    cache = model.new_cache(num_rows=6, max_len=100)
    padded = torch.nn.utils.rnn.pad_sequence([s[:n] for s, n in zip(sequences, lengths, strict=True)], batch_first=True)
    logits = [model.prefill(padded[:2], torch.tensor(lengths[:2]), cache, 0)]
    logits.append(model.prefill(padded[2:], torch.tensor(lengths[2:]), cache, 2))
    logits_BV, lengths_B = torch.cat(logits), torch.tensor(lengths)

    def check() -> None:
        for row, n in enumerate(lengths_B.tolist()):
            actual = torch.log_softmax(logits_BV[row], -1)
            torch.testing.assert_close(actual, expected[row][n - 1], atol=2e-5, rtol=0)

    def decode(num_tokens: int) -> None:
        nonlocal logits_BV, lengths_B
        for _ in range(num_tokens):
            check()
            last = torch.stack([s[n] for s, n in zip(sequences, lengths_B.tolist(), strict=True)])
            logits_BV, lengths_B = model.decode(last, lengths_B, cache), lengths_B + 1

    decode(5)
    more = torch.tensor([1, 12, 7])  # of rows 1 to 3
    given = [s[n : n + num] for s, n, num in zip(sequences[1:], lengths_B[1:].tolist(), more.tolist(), strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=3)
    logits_BV = torch.cat([logits_BV[:1], model.append(padded, more, lengths_B[1:], cache, 1)])
    lengths_B[1:] += more
    decode(3)


def test_the_model_of_a_study_takes_float32_and_computes_in_bfloat16(tmp_path: Path) -> None:
    """As one in bfloat16 does with the same weights, also after a push."""
    save(CONFIGS["mixture"], tmp_path)
    rounded = RoundedModel.from_pretrained(tmp_path, max_len=8)
    plain = Model.from_pretrained(tmp_path, max_len=8, dtype=torch.bfloat16)

    def logits(model: Model) -> torch.Tensor:
        return model.prefill(torch.arange(3)[None], torch.tensor([3]), model.new_cache(num_rows=1, max_len=8), 0)

    first = logits(rounded)
    assert torch.equal(first, logits(plain))
    for name, weight in rounded.named_weights.items():
        rounded.check_weight(TensorSpec(name, "float32", tuple(weight.shape)))
        weight.mul_(1.1)
        plain.named_weights[name].copy_(weight)
    assert torch.equal(logits(rounded), logits(plain))
    assert not torch.equal(logits(rounded), first)


def test_padding_may_reach_beyond_the_cache(tmp_path: Path) -> None:
    save(CONFIGS["qwen3"], tmp_path)
    model = Model.from_pretrained(tmp_path, max_len=8)
    ids_T = torch.arange(5, 12)
    cache = model.new_cache(num_rows=2, max_len=8)
    model.prefill(ids_T[None, :5].repeat(2, 1), torch.tensor([5, 1]), cache, 0)
    tokens_BT = torch.stack([ids_T[[5, 6, 0, 0, 0, 0]], ids_T[1:]])
    found_BV = model.append(tokens_BT, torch.tensor([2, 6]), torch.tensor([5, 1]), cache, 0)
    expected_BV = model.prefill(ids_T[None], torch.tensor([7]), model.new_cache(num_rows=1, max_len=8), 0)
    torch.testing.assert_close(found_BV, expected_BV.expand(2, -1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "hybrid"])
def test_a_moved_row_continues_as_before(name: str, tmp_path: Path) -> None:
    save(CONFIGS[name], tmp_path)
    model = Model.from_pretrained(tmp_path, max_len=64)
    cache = model.new_cache(num_rows=3, max_len=64)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    model.prefill(ids, torch.tensor([4, 4]), cache, 0)
    cache.arrange([2], [1], 4)
    expected = model.decode(torch.tensor([1, 2]), torch.tensor([4, 4]), cache)[1]
    cache.arrange([0], [2], 4)
    torch.testing.assert_close(model.decode(torch.tensor([2]), torch.tensor([4]), cache)[0], expected)


def test_a_new_cache_is_zero_whatever_its_memory_held(tmp_path: Path) -> None:
    """A masked position counts 0 times what is in memory there, and 0 times nan is nan."""
    save(CONFIGS["qwen3"], tmp_path)
    model = Model.from_pretrained(tmp_path, max_len=16)
    size = model.new_cache(num_rows=2, max_len=16).data.numel()
    used = [torch.full((size,), torch.nan) for _ in range(50)]
    del used
    cache = model.new_cache(num_rows=2, max_len=16)
    assert not cache.data.any()
    model.prefill(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]), cache, 0)
    assert model.decode(torch.tensor([1, 2]), torch.tensor([3, 2]), cache).isfinite().all()


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    reference = save(CONFIGS["qwen2"], tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = Model.from_pretrained(tmp_path, max_len=16)
    state = reference.state_dict()
    assert model.named_weights.keys() == state.keys()
    for name, weight in model.named_weights.items():
        assert torch.equal(weight, state[name]), name


def test_named_weights_are_the_weights(tmp_path: Path) -> None:
    save(CONFIGS["qwen3"], tmp_path / "a")
    other = save(CONFIGS["qwen3"], tmp_path / "b")
    model = Model.from_pretrained(tmp_path / "a", max_len=16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        for name, weight in other.state_dict().items():
            model.check_weight(TensorSpec(name, "float32", tuple(weight.shape)))
            model.named_weights[name].copy_(weight)
        ids = torch.tensor([[3, 4, 5]])
        logits = model.prefill(ids, torch.tensor([3]), model.new_cache(num_rows=1, max_len=8), 0)
        torch.testing.assert_close(logits[0], other(ids).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_bad_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        Model.from_pretrained(tmp_path, max_len=8)
    save(CONFIGS["qwen3"], tmp_path)
    with pytest.raises(CheckpointError, match="300 tokens"):
        Model.from_pretrained(tmp_path, max_len=300)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    cases = [
        ({k: v for k, v in whole.items() if k != "model.norm.weight"}, r"1 missing: model\.norm\.weight"),
        (
            whole | {"model.norm.weight": torch.ones(5)},
            r"model\.norm\.weight \(model\.safetensors\) is \[5\]",
        ),
        (whole | {"model.stray": torch.ones(5)}, "1 unexpected: model.stray"),
    ]
    for weights, message in cases:
        save_file(weights, file)
        with pytest.raises(CheckpointError, match=message):
            Model.from_pretrained(tmp_path, max_len=8)
    file.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        Model.from_pretrained(tmp_path, max_len=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"'gpt2' is not supported.*docs/models\.md"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}, "sliding"),
    ],
)
def test_unsupported_configs_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save(CONFIGS["qwen2"], tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        Model.from_pretrained(tmp_path, max_len=8)


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    grid = [(seed, position) for seed in range(200) for position in range(100)]
    draws = uniform([s for s, _ in grid], [p for _, p in grid]).reshape(200, 100)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert len(np.unique(draws)) == draws.size
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 110  # 1 - 1e-6 quantile of chi-square with 49 degrees of freedom
    neighbours = [np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]]
    neighbours.append(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1])
    assert np.abs(neighbours).max() < 5 / np.sqrt(draws.size)


REQUEST = GenerateRequest("r", (1, 2), max_new_tokens=4, temperature=1.0, stop_token_ids=(), seed=0)


def good_reply() -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [0.00001, 9, None]],
        "weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    }
    return {"output_ids": [7, 8, 9], "meta_info": meta}


def test_a_good_reply_is_read() -> None:
    result = parse_reply(good_reply(), REQUEST, 10)
    assert result.behaviour_logprobs.tolist() == [-0.5, -1.5, 0.0]
    assert result.spans == (VersionSpan(-1, 0, 1), VersionSpan(4, 1, 3))
    assert (result.finish_reason, result.num_prompt_tokens, result.num_cached_tokens) == ("length", 2, 1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("output_ids", None, "output_ids"),
        ("output_ids", [7, 8], "output_ids has length 2"),
        ("output_ids", [7, 8, 9, 1, 1], "at most 4"),
        ("output_ids", [7, 8, 10], "outside the vocabulary"),
        ("output_ids", [7, 8, True], "outside the vocabulary"),
        ("meta_info", None, "finish_reason"),
        ("finish_reason", None, "finish_reason"),
        ("finish_reason", {"type": "odd"}, "odd"),
        ("output_token_logprobs", None, "no output_token_logprobs"),
        ("output_token_logprobs", [[-0.5, 7, None]], "output_token_logprobs has length 1, output_ids has length 3"),
        ("output_token_logprobs", [[-0.5, 7], [-1.0, 7], [-1.0, 9]], "does not belong to token 8"),
        ("output_token_logprobs", [[float("nan"), 7], [-1.0, 8], [-1.0, 9]], "nan"),
        ("output_token_logprobs", [[float("-inf"), 7], [-1.0, 8], [-1.0, 9]], "inf"),
        ("output_token_logprobs", [[0.5, 7], [-1.0, 8], [-1.0, 9]], "0.5"),
        ("output_token_logprobs", [[None, 7], [-1.0, 8], [-1.0, 9]], "None"),
        ("weight_versions", None, "weight_versions"),
        ("weight_versions", [{"version": "4", "start": 0, "end": 2}], "cover"),
        ("weight_versions", [{"version": "4", "start": 1, "end": 3}], "cover"),
        ("weight_versions", [{"version": "v4", "start": 0, "end": 3}], "'v4' is not a whole number"),
        ("weight_versions", [{"version": 1.5, "start": 0, "end": 3}], "1.5 is not a whole number"),
        ("weight_versions", [{"version": float("inf"), "start": 0, "end": 3}], "inf is not a whole number"),
        ("id", "another", "the reply is for request 'another'"),
        ("prompt_tokens", 1, "it continues 1 prompt token, but 2 were sent"),
    ],
)
def test_a_bad_reply_is_refused(path: str, value: Any, message: str) -> None:
    reply = good_reply()
    (reply if path in reply else reply["meta_info"])[path] = value
    with pytest.raises(ValueError, match=message):
        parse_reply(reply, REQUEST, 10)
