"""The plan's arithmetic against counts by hand, and what it suggests."""

from __future__ import annotations

import math

import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.preflight import work
from bapo_megatron.preflight.gpus import GIB, GPUS
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.preflight.memory import forwards_under_way, trainer_memory
from bapo_megatron.preflight.parameters import model_parameters
from bapo_megatron.preflight.plan import check_cluster, make_plan
from bapo_megatron.preflight.rollouts import decode_seconds, server_memory
from bapo_megatron.preflight.suggest import suggest

SHAPE = model_shape(KNOWN_MODELS["DeepSeek-R1-Distill-Qwen-7B"])
GPU_BYTES = 80 * GIB


def recipe(*overrides: str) -> Config:
    files = ["models/r1-distill-qwen-7b-32k", "algorithms/bapo", "clusters/4x8-h100"]
    return load_config(files, overrides)


def test_six_flops_per_weight_and_token() -> None:
    """Of a model whose attention and embedding are small beside its matrices, the usual rule."""
    tokens = work.StepTokens(num_sequences=1, prompt=1, response=63)
    config = recipe("train.recompute=false")
    rule = 6 * (model_parameters(SHAPE) - 2 * SHAPE.vocab_size * SHAPE.hidden_size) * tokens.total
    output = 8 * SHAPE.vocab_size * SHAPE.hidden_size * 63  # logits twice, two gradients
    assert math.isclose(work.step_flops(config, SHAPE, tokens, 0), rule + output, rel_tol=2e-3)


def test_attention_counts_each_pair_of_tokens_once() -> None:
    """Against the sum over positions: a query at position i meets i keys, in two products."""
    tokens = work.StepTokens(num_sequences=3, prompt=50, response=950)
    layers, _ = work.forward_flops(SHAPE, tokens)
    without, _ = work.forward_flops(SHAPE, work.StepTokens(tokens.total, prompt=1, response=0))
    pairs = 3 * sum(range(1, 1001))
    by_hand = 2 * 2 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim * pairs
    assert math.isclose(layers - without, by_hand, rel_tol=3e-3)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ("loss.name=grpo", 0),
        ("bapo.scope=lagged", 0),
        ("bapo.scope=microbatch", 0),
        ("train.schedule=interleaved", 1),
        ("train.schedule=forwards_first", 0),
        ("train.schedule=interleaved train.epochs_per_step=3", 3),
        ("train.schedule=interleaved loss.proximal=learner loss.kl_coef=0.1", 3),
    ],
)
def test_scoring_passes(overrides: str, passes: int) -> None:
    config = recipe(*overrides.split())
    forwards_first = config.train.schedule == "forwards_first"
    assert work.num_scoring_passes(config, forwards_first) == passes


def test_what_the_distributed_optimizer_saves() -> None:
    whole = trainer_memory(recipe("optimizer.distributed=false"), SHAPE, gpu_bytes=GPU_BYTES)
    split = trainer_memory(recipe(), SHAPE, gpu_bytes=GPU_BYTES)
    assert whole.optimizer == 12 * whole.num_parameters
    assert math.isclose(split.optimizer, whole.optimizer / 4, rel_tol=1e-6)
    assert (split.weights, split.gradients) == (whole.weights, whole.gradients)


def test_forward_passes_first_keep_every_micro_batch() -> None:
    by_turns = trainer_memory(recipe("train.schedule=interleaved"), SHAPE, gpu_bytes=GPU_BYTES)
    all_first = trainer_memory(recipe("train.schedule=forwards_first"), SHAPE, gpu_bytes=GPU_BYTES)
    auto = trainer_memory(recipe(), SHAPE, gpu_bytes=GPU_BYTES)
    assert by_turns.activations < auto.activations < all_first.activations
    kept = forwards_under_way(recipe(), SHAPE, GPU_BYTES)
    inputs = 34816 // 4 * SHAPE.hidden_size * 2 * SHAPE.num_layers  # of one micro-batch
    assert kept == int(0.1 * GPU_BYTES / inputs) > 1, "auto: layer inputs of a tenth of the memory"


def test_a_reference_policy_costs_its_weights() -> None:
    without, with_kl = (
        trainer_memory(recipe(o), SHAPE, gpu_bytes=GPU_BYTES) for o in ("run.seed=0", "loss.kl_coef=0.1")
    )
    assert with_kl.total - without.total == without.weights


def test_a_critic_costs_nearly_as_much_as_the_policy() -> None:
    """The same layers; an output layer less."""
    config = recipe("advantage.kind=gae")
    memory = trainer_memory(config, SHAPE, gpu_bytes=GPU_BYTES)
    policy = memory.weights + memory.gradients + memory.optimizer
    assert 0.9 * policy < memory.critic < policy


def test_kv_cache_of_a_server() -> None:
    """2 x 28 layers x 4 heads x 128 x bfloat16 are 57,344 bytes a token, shared by 4 ranks."""
    memory = server_memory(recipe(), SHAPE, 80.0)
    assert memory.kv_bytes_per_token == 57_344 // 4
    assert memory.kv_cache == int(0.85 * 80 * GIB) - model_parameters(SHAPE) * 2 // 4
    assert memory.concurrency == 512 // 4, "all responses of a step fit: four servers share them"
    small = server_memory(recipe("sglang.extra.mem_fraction_static=0.1"), SHAPE, 80.0)
    assert small.concurrency == small.kv_tokens // (2048 + 32768)


def test_decoding_one_response_reads_the_weights_once_a_token() -> None:
    config = recipe("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "train.minibatches_per_step=1")
    tokens = work.StepTokens.of(config, 100)
    seconds = decode_seconds(config, SHAPE, GPUS["h100"], server_memory(config, SHAPE, 80.0), tokens)
    assert math.isclose(seconds, 100 * model_parameters(SHAPE) * 2 / 4 / 3.35e12, rel_tol=0.01)


def test_sync() -> None:
    plan = make_plan(recipe(), SHAPE)
    assert plan.sync_bytes == 2 * model_parameters(SHAPE)
    gathering = plan.sync_bytes * 3 / 4 / 450e9
    assert math.isclose(plan.sync.least, gathering + plan.sync_bytes / 50e9)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("cluster.gpus_per_node=6", ["parallel.tensor=4 does not divide", "server_tensor_parallel=4 does not divide"]),
        ("cluster.gpu_memory_gib=20", ["a trainer rank needs", "95% of a H100 SXM 80 GB are 19.0 GiB"]),
        ("sglang.extra.mem_fraction_static=0.04", ["has room for 0 tokens", "one response takes 34816"]),
    ],
)
def test_what_does_not_fit_is_told_with_the_numbers(overrides: str, parts: list[str]) -> None:
    config = recipe(*overrides.split())
    text = "\n".join(v.message for v in check_cluster(config, KNOWN_MODELS["DeepSeek-R1-Distill-Qwen-7B"]))
    assert all(part in text for part in parts), text


def test_suggestions_fit_and_are_faster() -> None:
    config = recipe()
    present = make_plan(config, SHAPE)
    found = suggest(config, SHAPE, present)
    assert found
    for s in found:
        changed = make_plan(recipe(*s.overrides), SHAPE)
        assert changed.fits
        assert changed.train.expected < present.train.expected
        assert check_cluster(recipe(*s.overrides), KNOWN_MODELS["DeepSeek-R1-Distill-Qwen-7B"]) == []
        assert changed.train == s.plan.train, "the overrides give what was promised"


def test_a_layout_that_does_not_fit_gets_one_that_does() -> None:
    config = recipe("parallel.tensor=1", "parallel.sequence=false", "parallel.data=16", "train.recompute=false")
    present = make_plan(config, SHAPE)
    assert not present.fits
    assert all(s.plan.fits for s in suggest(config, SHAPE, present))
    assert suggest(config, SHAPE, present)
