"""Parameters that are not trained, and one that no Hugging Face folder has, in gradients, Adam, snapshots and plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT, read_index
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import COPY, FAMILIES, LAYER, OUTSIDE, Block, Parameter
from bapo_megatron.hf.splits import is_any
from bapo_megatron.learner.exchange import gather_weights
from bapo_megatron.learner.layers import Kit
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.precision import check_precision
from bapo_megatron.machine.memory import trainer_memory
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.resolved import Resolved, resolve
from tests.distributed import run_distributed
from tests.integration.learner_reference import BOUNDS, random_batch, save_random_model
from tests.integration.test_learner import assert_close, make_config, make_minibatch

FROZEN = ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "embedding.word_embeddings.weight")
FROZEN_IN_LAYER = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
FROZEN_TENSORS = (*FROZEN_IN_LAYER, "embed_tokens.weight")
NUM_UPDATES = 3
WHOLE, PARTS = {"recompute": True}, {"recompute": True, "recompute_modules": ["core_attn", "mlp"]}
RUNS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor": 2, "sequence": True}, WHOLE),
    ({"pipeline": 2}, PARTS),
    ({"data": 2, "distributed": True, "overlap_communication": True}, WHOLE),
]


def with_extra(kit: Kit) -> None:
    """Add a vector to the output of attention, which starts as zero, like an adapter."""

    class Extra(kit.row):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(*args, config=config, **kwargs)
            self.extra = torch.nn.Parameter(torch.zeros(config.hidden_size, dtype=config.params_dtype))
            self.extra.sequence_parallel = config.sequence_parallel  # Megatron then sums its gradient over tensor ranks

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            out, bias = super().forward(x)
            return out + self.extra, bias

    kit.layer.submodules.self_attention.submodules.linear_proj = Extra


def partly_trained(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(one, trained=one.name not in FROZEN) for one in parameters)


EXTRA = Parameter("self_attention.linear_proj.extra", COPY, {"extra": "E"}, stored=False)
FAMILY = replace(
    FAMILIES["llama"],
    layer=Block((*partly_trained(LAYER.parameters), EXTRA), trainer=with_extra),
    outside=partly_trained(OUTSIDE),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seam")
    save_random_model("llama", root / "model")
    return root


def resolved(root: Path, layout: dict[str, Any], family: str = f"{__name__}:FAMILY", **train: Any) -> Resolved:
    config = make_config(layout, **train)
    model = config.model.model_copy(update={"family": family})
    return resolve(config.model_copy(update={"model": model}), root / "model")


def gradients_of_all(root: Path) -> dict[str, Tensor]:
    """Return the first gradients of the same model, all of whose parameters are trained."""
    learner = MegatronLearner(resolved(root, RUNS[0][0], family="auto"))
    learner.step(make_minibatch(learner, 60, random_batch()), BOUNDS)
    return {name: gradient.clone() for name, gradient in learner.named_gradients()}


def gathered(learner: MegatronLearner) -> dict[str, Tensor]:
    found = gather_weights(learner.model, learner.shape, learner.layout, are_gathered=is_any)
    return {name: tensor.clone() for name, tensor in found}


def check_one(rank: int, world_size: int, root: Path) -> None:
    """Train in each layout: all give the same weights. Then train one update in each, resuming the one before."""
    original = load_file(root / "model" / "model.safetensors")
    whole, extras = gradients_of_all(root), dict[str, Tensor]()
    parallel_state.destroy_model_parallel()
    for layout, train in RUNS:
        learner = MegatronLearner(resolved(root, layout, **train))
        minibatch = make_minibatch(learner, 60, random_batch())
        with_room = {parameter for chunk in learner.wrapped for buffer in chunk.buffers for parameter in buffer.params}
        assert with_room == {parameter for parameter in learner.model.parameters() if parameter.requires_grad}
        assert len(with_room) < len([*learner.model.parameters()])
        for number in range(NUM_UPDATES):
            learner.step(minibatch, BOUNDS)
            gradients = dict(learner.named_gradients())
            assert not any(name.endswith(FROZEN_TENSORS) for name in gradients)
            if rank == 0 and number == 0:
                assert whole.keys() - gradients.keys() == {n for n in whole if n.endswith(FROZEN_TENSORS)}
                for name, gradient in gradients.items():
                    if name in whole:
                        assert_close(gradient, whole[name], f"{layout}: {name}")
                    else:
                        assert gradient.abs().max() > 1e-6, name
                        extras.setdefault(name, gradient.clone())
                        assert_close(gradient, extras[name], f"{layout}: {name}")
        sent = [name for name, _ in learner.weights().whole()]
        weights = gathered(learner)
        assert sent == [spec.name for spec in learner.weights().manifest()]
        assert not any("extra" in name for name in sent)
        assert not any("extra" in piece.name for piece in learner.weights().pieces())
        if rank == 0:
            for name, weight in weights.items():
                changes = not name.endswith(FROZEN_TENSORS)
                assert torch.equal(weight, original.get(name, torch.zeros_like(weight))) != changes, name
            if layout == RUNS[0][0]:
                torch.save(weights, root / "straight.pt")
            for name, expected in torch.load(root / "straight.pt").items():
                assert_close(weights[name], expected, f"{layout}: {name}", 1e-5)
        parallel_state.destroy_model_parallel()

    store = CheckpointStore(root / "saved", CheckpointConfig())
    for number, (layout, train) in enumerate(RUNS):
        learner = MegatronLearner(resolved(root, layout, **train))
        if number:
            assert store.resume({"learner": learner}) is not None
        learner.step(make_minibatch(learner, 60, random_batch()), BOUNDS)
        path = store.save(number + 1, {"learner": learner}, None)
        tensors = read_index(path / "learner").tensors
        frozen = {one for one in original if one.endswith(FROZEN_TENSORS)}
        assert len(frozen) == 4 * len(FROZEN_IN_LAYER) + 1
        assert len({one for one in tensors[WEIGHT] if one.endswith("extra")}) == 4
        for part in (WEIGHT, *MOMENTS):
            assert original.keys() - tensors[part].keys() == frozen, "they stay in the model's folder"
        weights = gathered(learner)
        parallel_state.destroy_model_parallel()
    if rank == 0:
        for name, expected in torch.load(root / "straight.pt").items():
            assert_close(weights[name], expected, f"resumed: {name}", 1e-5)


def test_frozen_and_unstored_parameters_train_and_resume_in_every_layout(root: Path) -> None:
    run_distributed(check_one, 2, root)
    source = root / "saved" / f"step-{NUM_UPDATES:06d}"
    convert(source, root / "exported", own=FAMILY)
    original, exported = (load_file(root / name / "model.safetensors") for name in ("model", "exported"))
    assert exported.keys() == original.keys()
    for name, weight in original.items():
        assert torch.equal(exported[name], weight) == name.endswith(FROZEN_TENSORS), name
    with pytest.raises(CheckpointError, match=r"extra, which only a run can make"):
        convert(root / "model", root / "back", to="training", own=FAMILY)


def test_memory_counts_gradients_and_moments_of_trained_parameters_alone(root: Path) -> None:
    plain, seam = resolved(root, {}, family="auto"), resolved(root, {})
    assert model_parameters(seam.shape) == model_parameters(plain.shape), "what is sent"
    less, more = trainer_memory(seam), trainer_memory(plain)
    extra = 4 * seam.shape.hidden_size
    frozen = 4 * 32 * (64 + 2 * 48) + 33 * 32  # four layers: queries, keys and values; gate and up. And the embedding
    assert less.weights == more.weights + 4 * extra
    assert less.gradients == more.gradients + 4 * (extra - frozen)
    assert less.optimizer == more.optimizer + 8 * (extra - frozen)


def test_frozen_parameters_have_no_float32_weights_that_fp8_could_be_made_from(root: Path) -> None:
    run = resolved(root, {"distributed": True})
    precision = run.config.precision.model_copy(update={"fp8": "hybrid", "fp8_params": True})
    config = run.config.model_copy(update={"precision": precision})
    found = [one.message for one in check_precision(config, shape=run.shape, machine=None)]
    assert any(f'model.family="{__name__}:FAMILY" does not train all of them' in message for message in found)
    plain = [
        one.message for one in check_precision(config, shape=resolved(root, {}, family="auto").shape, machine=None)
    ]
    assert not any("does not train" in message for message in plain)
