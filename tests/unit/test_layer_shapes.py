"""Layers one by one: parameters, FLOPs and memory are sums over them, even with experts, of which tokens use few."""

import json
from dataclasses import replace

import pytest

from bapo_megatron.config.schema import Config, ParallelConfig
from bapo_megatron.hf.families import ATTENTION, LAYER, Block, Parameter
from bapo_megatron.hf.shape import Dense, Experts, LayerShape, ModelShape, entries, model_shape
from bapo_megatron.machine.memory import trainer_memory
from bapo_megatron.machine.parameters import active_parameters, largest_tensor, model_parameters, rank_parameters
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from tests.resolving import shaped
from tests.unit.test_hf_convert import make_shape
from tests.unit.test_splits import EXPERTS

DENSE = LayerShape(Dense(24), LAYER)


def with_experts(mlp: Experts, names: tuple[Parameter, ...] = EXPERTS) -> LayerShape:
    return LayerShape(mlp, Block((*ATTENTION[:-1], *names)))


@pytest.mark.parametrize(
    ("model", "total", "idle"),
    [
        ("Qwen3-30B-A3B", 30_532_122_624, 48 * 3 * 2048 * 768),
        ("Qwen3-235B-A22B", 235_093_634_560, 94 * 3 * 4096 * 1536),
    ],
)
def test_parameters_of_mixtures_are_as_their_names_say(model: str, total: int, idle: int) -> None:
    shape = model_shape(KNOWN_MODELS[model])
    assert model_parameters(shape) == total
    assert active_parameters(shape) == total - 120 * idle
    assert rank_parameters(shape, ParallelConfig(), 0).total == model_parameters(shape)


def test_a_dense_model_is_active_as_a_whole() -> None:
    for shape in map(model_shape, KNOWN_MODELS.values()):
        if shape.experts is None:
            assert active_parameters(shape) == model_parameters(shape)


def uneven() -> ModelShape:
    """Return one dense layer, then two with shared experts."""
    mlp = Experts(num_experts=4, num_chosen=2, ffn_size=10, normalised=True, shared_ffn_size=6)
    return replace(make_shape("llama"), layers=(DENSE, *(with_experts(mlp),) * 2))


def test_flops_are_a_sum_over_layers() -> None:
    shape = uneven()
    each = [replace(shape, layers=(layer,)).forward_flops(5, 25, 3)[0] for layer in shape.layers]
    assert shape.forward_flops(5, 25, 3)[0] == sum(each)
    routed = 16 * (4 + 3 * (2 * 10 + 6))  # router, two experts of ten rows, and the shared ones
    assert each[1] - each[0] == 2 * 5 * (routed - 3 * 16 * 24)


def test_parameters_are_a_sum_over_layers_and_stages() -> None:
    shape = uneven()
    stages = [rank_parameters(shape, ParallelConfig(pipeline=3), stage).total for stage in range(3)]
    assert sum(stages) == model_parameters(shape)
    assert stages[1] != stages[0] - 11 * 16, "the first layer has no experts"
    assert largest_tensor(shape) == 48 * 16, "the queries"


def test_memory_of_layers_follows_the_widest_chunk() -> None:
    shape, config = uneven(), Config.model_validate({"parallel": {"pipeline": 3}})
    kept = [trainer_memory(shaped(config, replace(shape, layers=layers))).activations for layers in layouts_of(shape)]
    assert kept[0] == kept[1] > kept[2]


def layouts_of(shape: ModelShape) -> list[tuple[LayerShape, ...]]:
    dense, routed, _ = shape.layers
    return [(dense, routed, routed), (routed, routed, routed), (dense, dense, dense)]


def test_the_agreed_facts_of_a_dense_model_are_as_ever() -> None:
    """Checkpoints hold these facts; those saved before layers were told apart stay readable."""
    shape = make_shape("llama")
    facts = shape.to_json()
    assert (facts["num_layers"], facts["ffn_size"]) == (2, 24)
    assert set(facts) == {
        *("family", "num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
        *("norm_eps", "tied_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "norm_plus_one"),
        *("activation", "embedding_scale", "max_positions", "rope", "has_value_head"),
    }
    assert json.loads(json.dumps(uneven().to_json())) == uneven().to_json()
    assert uneven().to_json()["mlps"][1]["num_experts"] == 4


def test_entries_of_every_layer_are_those_of_its_own_table() -> None:
    by_layer = [[e.megatron_name for e in entries(uneven()) if e.layer == number] for number in range(3)]
    assert "decoder.layers.0.mlp.linear_fc1.weight" in by_layer[0]
    assert not any("experts" in name for name in by_layer[0])
    assert sum("local_experts" in name for name in by_layer[2]) == 8
