"""Exact parameter counts: against Megatron's own model on the meta device, and against the tensors of checkpoints."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bapo_megatron_patches.megatron_core import apply_cpu_compat
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from bapo_megatron.config.schema import Config, ParallelConfig
from bapo_megatron.hf.shape import ModelShape, model_shape
from bapo_megatron.learner import policy
from bapo_megatron.learner.critic import CriticModel
from bapo_megatron.learner.fit import OWN_FIELDS
from bapo_megatron.learner.parallel import ParallelLayout, start_processes
from bapo_megatron.learner.policy import PolicyModel, transformer_config
from bapo_megatron.machine.parameters import Held, model_parameters, rank_parameters
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from tests.hf_models import HYBRID_MIXTURES, HYBRIDS, MIXTURES, MODELS, make_model_config
from tests.unit.test_hybrids import QWEN_9B, QWEN_27B, published

SLOW = pytest.mark.slow


@contextmanager
def fake_rank(config: Config, rank: int, world_size: int) -> Iterator[ParallelLayout]:
    """Make this process one rank of a group whose other members do not exist: collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        start_processes(config.parallel)
        yield ParallelLayout.current(config.parallel)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron_count(
    shape: ModelShape, config: Config, rank: int, world_size: int, kind: type[PolicyModel] = PolicyModel
) -> tuple[int, Held]:
    """Return (pipeline stage, parameters) of one rank, as Megatron builds it, without taking memory."""
    with fake_rank(config, rank, world_size) as layout, torch.device("meta"):
        settings = transformer_config(shape, config)
        chunks = [kind(settings, shape, layout, chunk) for chunk in range(layout.num_chunks)]
        every = [p for chunk in chunks for p in chunk.parameters()]
        expert = sum(p.numel() for p in every if not getattr(p, "allreduce", True))
        return layout.pipeline_rank, Held(sum(p.numel() for p in every) - expert, expert)


def make_config(**parallel: object) -> Config:
    return Config.model_validate(
        {
            "parallel": parallel,
            "model": {"dtype": "bfloat16"},
            "megatron": {"extra": {"use_cpu_initialization": True}},
        }
    )


@pytest.fixture(autouse=True)
def _meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_cpu_compat()
    monkeypatch.setattr(policy, "device", lambda: torch.device("meta"))
    # plain numbers; the scaled kinds would compute them from values, which a meta tensor does not have
    monkeypatch.setattr(policy, "rotary_frequencies", lambda shape: (torch.empty(shape.head_dim // 2), 1.0))


def check_ranks(shape: ModelShape, config: Config, world_size: int, ranks: Iterable[int]) -> None:
    for rank in ranks:
        stage, count = megatron_count(shape, config, rank, world_size)
        assert count == rank_parameters(shape, config.parallel, stage), f"rank {rank}"


R1_32B, QWEN3_32B = "DeepSeek-R1-Distill-Qwen-32B", "Qwen3-32B"


@pytest.mark.parametrize(
    ("model", "world_size", "layout"),
    [
        (R1_32B, 64, {"tensor": 8, "pipeline": 4, "data": 2}),  # 13 s, nearly all of them for Megatron's groups
        pytest.param(
            QWEN3_32B, 64, {"tensor": 4, "pipeline": 4, "virtual_pipeline": 2, "context": 2, "data": 2}, marks=SLOW
        ),
        pytest.param(R1_32B, 128, {"tensor": 8, "pipeline": 4, "data": 4}, marks=SLOW),
        pytest.param(QWEN3_32B, 256, {"tensor": 8, "pipeline": 4, "context": 2, "data": 4}, marks=SLOW),
    ],
)
def test_every_rank_of_a_32b_model_holds_what_the_plan_says(
    model: str, world_size: int, layout: dict[str, int]
) -> None:
    config = make_config(**layout, sequence=True)
    check_ranks(model_shape(KNOWN_MODELS[model]), config, world_size, range(world_size))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_and_option(name: str) -> None:
    """Odd head dimensions, biases, norms of queries, tied embeddings (twice if two stages need them), padding."""
    shape = model_shape(make_model_config(name).to_dict())
    for tensor, pipeline, chunks in ((1, 1, 1), (2, 1, 1), (2, 3, 2), (1, 6, 1)):
        config = make_config(tensor=tensor, pipeline=pipeline, virtual_pipeline=chunks)
        check_ranks(shape, config, tensor * pipeline, range(0, tensor * pipeline, tensor))


@pytest.mark.parametrize("name", HYBRIDS)
def test_linear_and_full_attention(name: str) -> None:
    shape = model_shape(make_model_config(name).to_dict())
    for tensor, pipeline, chunks in ((1, 1, 1), (2, 1, 1), (2, 3, 2), (1, 6, 1)):
        config = make_config(tensor=tensor, pipeline=pipeline, virtual_pipeline=chunks)
        check_ranks(shape, config, tensor * pipeline, range(0, tensor * pipeline, tensor))


@pytest.mark.parametrize(
    ("text", "world_size", "layout"),
    [
        (QWEN_9B, 8, {"tensor": 4, "data": 2}),
        (QWEN_27B, 16, {"tensor": 4, "pipeline": 4}),
    ],
    ids=["9B", "27B"],
)
def test_every_rank_of_qwen3_5_holds_what_the_plan_says(
    text: dict[str, Any], world_size: int, layout: dict[str, int]
) -> None:
    check_ranks(model_shape(published(text)), make_config(**layout, sequence=True), world_size, range(world_size))


@pytest.mark.parametrize("name", [*MIXTURES, *HYBRID_MIXTURES])
def test_mixtures(name: str) -> None:
    """Experts on every rank, split over tensor ranks, or shared out; and a last stage of another depth."""
    shape = model_shape(make_model_config(name).to_dict())
    for world_size, layout in (
        (1, {"last_stage_layers": shape.num_layers}),
        (2, {"tensor": 2}),
        (4, {"tensor": 2, "data": 2, "expert": 2}),
        (4, {"pipeline": 2, "data": 2, "expert": 2, "last_stage_layers": 2, "virtual_pipeline": 2}),
    ):
        config = make_config(**layout, sequence="tensor" in layout)
        check_ranks(shape, config, world_size, range(0, world_size, 2))


@pytest.mark.parametrize(
    ("model", "world_size", "layout", "dense", "expert"),
    [
        ("Qwen3-30B-A3B", 8, {"data": 8, "expert": 8}, 1541, 3624),
        ("Qwen3-30B-A3B", 32, {"tensor": 4, "pipeline": 2, "data": 4, "expert": 8}, 197, 1812),
        ("Qwen3.5-35B-A3B", 8, {"tensor": 2, "data": 4, "expert": 8}, 1235, 4027),
        pytest.param(
            *("Qwen3-235B-A22B", 128, {"tensor": 4, "pipeline": 2, "data": 16, "expert": 32}, 1018, 3548), marks=SLOW
        ),
        pytest.param(
            "Qwen3-235B-A22B",
            128,
            {"tensor": 4, "pipeline": 8, "data": 4, "expert": 8, "last_stage_layers": 10},
            376,
            3624,
            marks=SLOW,
        ),
    ],
)
def test_published_mixtures(model: str, world_size: int, layout: dict[str, int], dense: int, expert: int) -> None:
    """Millions of parameters on the first rank; and every rank as the plan says."""
    shape, config = model_shape(KNOWN_MODELS[model]), make_config(**layout, sequence="tensor" in layout)
    first = rank_parameters(shape, config.parallel, 0)
    assert (round(first.dense / 1e6), round(first.expert / 1e6)) == (dense, expert)
    check_ranks(shape, config, world_size, range(world_size))


@pytest.mark.parametrize("name", ["qwen3", "llama3-tied"])
def test_a_critic(name: str) -> None:
    shape = model_shape(make_model_config(name).to_dict())
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 3)):
        config = make_config(tensor=tensor, pipeline=pipeline)
        for rank in range(0, tensor * pipeline, tensor):
            stage, count = megatron_count(shape, config, rank, tensor * pipeline, CriticModel)
            assert count == rank_parameters(shape.with_value_head(), config.parallel, stage)


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES, *HYBRIDS, *HYBRID_MIXTURES])
def test_the_ranks_of_a_replica_hold_the_model(name: str) -> None:
    shape = model_shape(make_model_config(name).to_dict())
    assert rank_parameters(shape, ParallelConfig(), 0).total == model_parameters(shape)


def test_published_sizes() -> None:
    """The sizes are billions of parameters, from the model cards."""
    sizes = {name: model_parameters(model_shape(config)) / 1e9 for name, config in KNOWN_MODELS.items()}
    expected = {
        "DeepSeek-R1-Distill-Qwen-7B": 7.62,
        "DeepSeek-R1-Distill-Qwen-32B": 32.76,
        "OctoThinker-3B-Long-Zero": 3.21,
        "Qwen2.5-Math-7B": 7.62,
        "Qwen3-32B": 32.76,
        "Qwen3.5-9B": 8.95,
        "Qwen3.5-27B": 26.9,
        "Qwen3.5-35B-A3B": 34.66,
    }
    assert {name: round(sizes[name], 2) for name in expected} == expected
    assert len(set(itertools.chain(expected, sizes))) == len(sizes)


def test_fields_that_differ_between_models_and_layouts_cannot_be_overridden() -> None:
    """Others are choices of the implementation, which `[megatron.extra]` may change."""
    models = [make_model_config(name).to_dict() for name in ("qwen2", "qwen3", "gemma", "qwen3.5-moe")]
    layouts: list[dict[str, Any]] = [
        {"tensor": 4, "sequence": True, "data": 2, "expert": 2},
        {"pipeline": 8, "last_stage_layers": 6, "context": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
    ]
    mixture = model_shape(KNOWN_MODELS["Qwen3-30B-A3B"])
    settings = [transformer_config(model_shape(model), make_config()) for model in models]
    settings += [transformer_config(mixture, make_config(**layout)) for layout in ({}, *layouts)]
    names = {field.name for field in dataclasses.fields(settings[0])}
    differing = {name for name in names for each in settings if getattr(each, name) != getattr(settings[0], name)}
    choices = ["batch_p2p_comm", "overlap_p2p_comm", "microbatch_group_size_per_vp_stage"]
    choices += ["moe_router_dtype", "moe_router_load_balancing_type", "moe_token_dispatcher_type"]
    choices += ["init_method", "embedding_init_method", "output_layer_init_method"]  # functions; they are not called
    assert differing - OWN_FIELDS.keys() == set(choices)
    assert OWN_FIELDS.keys() <= names
