"""FP8: what is refused and why, and what happens to the settings; all without a GPU."""

from typing import Any

import pytest
import torch

from bapo_megatron.buffer.packing import Pass
from bapo_megatron.config.load import load_config
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import ModelShape, model_shape
from bapo_megatron.learner.precision import (
    RECIPES,
    Machine,
    check_machine,
    check_precision,
    fp8_fields,
    logprob_backend,
    tokens_multiple,
    uses_transformer_engine,
    version_numbers,
)
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.checks.model import precision_warnings
from bapo_megatron.resolved import resolve
from tests.integration.learner_reference import random_batch

FP8 = "precision.fp8=hybrid model.dtype=bfloat16"
ADA, HOPPER, BLACKWELL, CONSUMER = (8, 9), (9, 0), (10, 0), (12, 0)
GOOD = Machine(HOPPER, (12, 9), (2, 11, 0))


def shape(**change: Any) -> ModelShape:
    """Return Qwen2.5-7B's sizes, unless changed."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    return model_shape(config | change)


def found(overrides: str, machine: Machine | None = None, **change: Any) -> list[str]:
    config = load_config([], f"{FP8} {overrides}".split())
    return [v.message for v in check_precision(config, shape=shape(**change), machine=machine)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_7b_model_is_fit_for_every_recipe(recipe: str) -> None:
    assert found(f"precision.recipe={recipe} parallel.tensor=4 parallel.sequence=true") == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("model.dtype=float32", ['model.dtype="bfloat16"', 'precision.fp8="off"']),
        ("model.implementation=local", ['model.implementation="local"', '"auto"']),
        ("precision.fp8_params=true", ["optimizer.distributed=true"]),
        ("precision.fp8_params=true optimizer.distributed=true precision.recipe=mxfp8", ["mxfp8", "fp8_params=false"]),
    ],
)
def test_one_refusal_of_settings(overrides: str, parts: list[str]) -> None:
    (message,) = found(overrides)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("overrides", "change", "parts"),
    [
        ("", {"hidden_size": 3592}, ["multiples of 16", "hidden_size = 3592", 'precision.fp8="off"']),
        ("precision.recipe=mxfp8", {"intermediate_size": 18960}, ["multiples of 32", "18960", '"tensorwise"']),
        ("parallel.tensor=4", {"intermediate_size": 18960}, ["18960 / parallel.tensor=4 = 4740", "parallel.tensor=1"]),
        (
            "parallel.tensor=4 parallel.sequence=true precision.recipe=blockwise",
            {"hidden_size": 3648, "head_dim": 128},
            ["multiple of 128", "3648", "parallel.sequence=false"],
        ),
    ],
)
def test_one_refusal_of_sizes(overrides: str, change: dict[str, int], parts: list[str]) -> None:
    messages = found(overrides, **change)
    assert any(all(part in message for part in parts) for message in messages), messages


def test_heads_count_on_each_rank() -> None:
    """2 key-value heads of size 8: 56 x 8 + 2 x 2 x 8 = 480 rows are 240 on each of two ranks, a multiple of 16."""
    change = {"num_attention_heads": 56, "num_key_value_heads": 2, "head_dim": 8}
    assert found("parallel.tensor=2", **change) == []
    query, all_heads = found("parallel.tensor=2", **(change | {"num_attention_heads": 58}))
    assert "= 464 / parallel.tensor=2 = 232" in query
    assert "= 496 / parallel.tensor=2 = 248" in all_heads


@pytest.mark.parametrize(
    ("recipe", "machine", "part"),
    [
        ("tensorwise", Machine((8, 0), (12, 8), (2, 11)), "8.9"),
        ("tensorwise", Machine(ADA, (12, 0), (2, 11)), "CUDA 12.1 on Ada"),
        ("tensorwise", Machine(ADA, (12, 1), (2, 11)), None),
        ("delayed", Machine(HOPPER, (11, 8), (1, 13)), None),
        ("tensorwise", Machine(HOPPER, (12, 4), (2, 1, 0)), "Transformer Engine 2.2, and 2.1.0"),
        ("blockwise", Machine(HOPPER, (12, 9), (2, 3)), None),
        ("blockwise", Machine(HOPPER, (12, 8), (2, 11)), "CUDA 12.9"),
        ("blockwise", Machine(ADA, (12, 9), (2, 11)), "9.0 (Hopper)"),
        ("blockwise", Machine(BLACKWELL, (12, 9), (2, 8)), "2.9 on GPUs after Hopper"),
        ("blockwise", Machine(BLACKWELL, (12, 9), (2, 9)), None),
        (
            "mxfp8",
            Machine(HOPPER, (12, 9), (2, 11)),
            "compute capability 10.x (data-centre Blackwell); this GPU has 9.0",
        ),
        ("mxfp8", Machine(CONSUMER, (12, 9), (2, 11)), "this GPU has 12.0"),
        ("mxfp8", Machine(BLACKWELL, (12, 9), (2, 11)), None),
        ("tensorwise", Machine(HOPPER, (12, 9), None), "run scripts/install_gpu.sh"),
        ("tensorwise", Machine(), "needs a GPU"),
    ],
)
def test_hardware(recipe: str, machine: Machine, part: str | None) -> None:
    messages = found(f"precision.recipe={recipe}", machine)
    assert len(messages) == (part is not None), messages
    assert part is None or part in messages[0], messages


def test_the_advice_works() -> None:
    """A machine accepts what the refusal of its hardware advises."""
    for machine in (
        Machine(HOPPER, (12, 4), (2, 11)),
        Machine((8, 0), (12, 4), (2, 11)),
        Machine(ADA, (12, 4), (2, 3)),
    ):
        for recipe in RECIPES:
            for message in found(f"precision.recipe={recipe}", machine):
                advice = message.rsplit("set ", 1)[1].replace('"', "")
                config = load_config([], f"{FP8} {advice}".split())
                assert check_precision(config, shape=shape(), machine=machine) == []


@pytest.mark.parametrize(
    ("overrides", "machine", "part"),
    [
        ("", Machine(HOPPER, (12, 9), (2, 11)), "model.dtype"),
        ("model.dtype=bfloat16", Machine(), "needs a GPU"),
        ("model.dtype=bfloat16", Machine(HOPPER, (12, 9), None), "not installed"),
        ("model.dtype=bfloat16", GOOD, None),
    ],
)
def test_transformer_engine_on_demand(overrides: str, machine: Machine, part: str | None) -> None:
    config = load_config([], f"model.implementation=transformer_engine {overrides}".split())
    messages = [v.message for v in check_precision(config, shape=None, machine=machine)]
    assert [part in m for m in messages] == [True] * (part is not None), messages


def test_transformer_engine_where_it_can_be_used() -> None:
    def uses(overrides: str, machine: Machine) -> bool:
        return uses_transformer_engine(load_config([], overrides.split()), machine)

    assert uses("model.dtype=bfloat16", GOOD)
    assert not uses("model.dtype=float32", GOOD)
    assert not uses("model.dtype=bfloat16 model.implementation=local", GOOD)
    assert not uses("model.dtype=bfloat16", Machine(HOPPER, (12, 9), None))
    assert not uses("model.dtype=bfloat16", Machine(transformer_engine=(2, 11)))


def test_check_names_what_can_be_known_without_a_gpu() -> None:
    overrides = ["precision.fp8=e4m3", "precision.fp8_params=true", "rollout.engine=sglang"]
    hf_config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 2048,
    }
    by_severity: dict[str, list[str]] = {"error": [], "warning": []}
    for violation in check_settings(resolve(load_config([], overrides), hf_config)):
        by_severity[violation.severity].append(violation.message)
    assert len(by_severity["error"]) == 3, by_severity  # dtype, distributed optimizer, hidden size
    assert any("needs a GPU" in message for message in by_severity["warning"])
    with_machine = check_settings(
        resolve(load_config([], overrides), hf_config), num_gpus=8, machine=Machine((8, 0), (12, 8))
    )
    assert any("8.9" in violation.message for violation in with_machine)


def test_warnings() -> None:
    def warnings(settings: str, num_gpus: int) -> list[str]:
        return [v.message for v in precision_warnings(resolve(load_config([], settings.split())), num_gpus)]

    assert ["scales" in m for m in warnings(f"{FP8} precision.recipe=delayed rollout.engine=sglang", 1)] == [True]
    assert ["embedded" in m for m in warnings(FP8, 1)] == [True]
    assert "triton" in warnings("train.logprob_backend=triton", 0)[0]
    assert warnings("", 0) == []


def test_settings_of_fp8_without_fp8_are_an_error() -> None:
    config = load_config([], ["precision.fp8_params=true"])
    (violation,) = check_precision(config, shape=None, machine=None)
    assert violation.settings == ("precision.fp8_params", "precision.fp8")
    assert 'nothing is FP8 with precision.fp8="off"' in violation.message


def test_a_learner_refuses_in_one_message() -> None:
    with pytest.raises(ConfigError, match=r"needs a GPU.*triton"):
        check_machine(load_config([], f"{FP8} train.logprob_backend=triton".split()), shape(), Machine())
    check_machine(load_config([], []), shape(), Machine())


@pytest.mark.parametrize("recipe", RECIPES)
def test_megatron_takes_the_fields(recipe: str) -> None:
    """Megatron's own checks pass, and it has the same layers in bfloat16 as we have."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    from bapo_megatron.learner.policy import transformer_config

    layers = "first_last_layers_bf16=true, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2"
    extra = [] if recipe == "delayed" else [f"megatron.extra={{{layers}}}"]
    config = load_config([], [*FP8.split(), f"precision.recipe={recipe}", *extra])
    settings = transformer_config(shape(), config)
    assert (settings.fp8, settings.fp8_recipe, settings.transformer_impl) == ("hybrid", recipe, "local")
    is_bf16 = [is_first_last_bf16_layer(settings, layer) for layer in range(28)]
    assert is_bf16 == [bool(extra) and (layer < 1 or layer >= 26) for layer in range(28)]


def test_megatrons_fields() -> None:
    assert fp8_fields(load_config([], [])) == {}
    assert fp8_fields(load_config([], FP8.split())) == {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param": False,
    }
    assert fp8_fields(load_config([], FP8.split()), fp8_params=True)["fp8_param"] is True
    delayed = fp8_fields(load_config([], f"{FP8} precision.recipe=delayed".split()))
    assert delayed["fp8_amax_compute_algo"] == "max"
    assert delayed["fp8_amax_history_len"] == 1024


def test_backend_of_log_probs() -> None:
    assert [logprob_backend(load_config([], [f"train.logprob_backend={b}"])) for b in ("auto", "torch", "triton")] == [
        "torch",
        "torch",
        "triton",
    ]


def test_versions() -> None:
    assert version_numbers("2.11.0+abc12") == (2, 11, 0)
    assert version_numbers("2.2.0.dev0") == (2, 2, 0)
    assert version_numbers("12.9") == (12, 9)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("tensor", "context", "sequence"), [(1, 1, False), (2, 1, True), (2, 2, True), (1, 3, False)])
def test_packs_are_padded_for_the_matrix_products(recipe: str, tensor: int, context: int, sequence: bool) -> None:
    """A rank's tokens, and its part under sequence parallelism, are multiples; the trained tokens do not change."""
    from bapo_megatron.learner.parallel import ParallelLayout

    multiple = tokens_multiple(load_config([], f"{FP8} precision.recipe={recipe}".split()))
    batch, rows = random_batch(), []
    for rank in range(context):
        layout = object.__new__(ParallelLayout)
        known = {"tensor_size": tensor, "context_size": context, "context_rank": rank, "pipeline_size": 2}
        for name, value in ({"data_rank": 0, "data_size": 1, "num_chunks": 1} | known).items():
            object.__setattr__(layout, name, value)
        share = layout.share(sequence_parallel=sequence, tokens_multiple=multiple)
        for minibatch in Pass(share, 60, num_minibatches=2).minibatches(batch):
            for pack in minibatch.micro_batches:
                assert pack.num_tokens % (multiple * (tensor if sequence else 1)) == 0
                assert int(pack.cu_seqlens_S1[-1]) == pack.num_tokens * context
                rows.append(pack.batch_rows_R)
    plain = Pass(type(share)(), 60, num_minibatches=2).minibatches(batch)
    trained = torch.cat([pack.batch_rows_R for minibatch in plain for pack in minibatch.micro_batches])
    assert torch.equal(torch.cat(rows).sort().values, trained.sort().values)


@pytest.mark.parametrize(
    ("settings", "machine", "is_refused"),
    [
        ("model.implementation=local", None, True),
        ("", GOOD, False),
        ("run.deterministic=true", GOOD, True),
        ("", Machine(HOPPER, (12, 9), None), True),  # "auto" means local there
        ("model.dtype=float32", None, True),
        ("model.implementation=local parallel.context=4 rollout.max_response_tokens=30000", None, False),
        ("model.implementation=local parallel.context=1", None, False),
    ],
)
def test_long_sequences_are_not_split_with_local_attention(
    settings: str, machine: Machine | None, is_refused: bool
) -> None:
    split = "model.dtype=bfloat16 parallel.context=2 rollout.max_response_tokens=65000"
    config = load_config([], f"{split} {settings}".split())
    messages = [v.message for v in check_precision(config, shape=None, machine=machine)]
    assert ["attention would keep a mask of" in m for m in messages] == [True] * is_refused
