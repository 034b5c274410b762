"""LoRA on Megatron's layers against `peft` on transformers, in every layout."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.checkpoint.folder import MOMENTS, WEIGHT, read_index
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.convert import convert
from bapo_megatron.errors import CheckpointError, UserError
from bapo_megatron.hf.adapters import PEFT_PREFIX, Adapters
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.peft import adapter_tensors
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner.lora import adapters_of
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.reference import OwnReference
from bapo_megatron.resolved import Resolved, resolve
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    ADAPTERS,
    BOUNDS,
    load_float64,
    merged_float64,
    random_batch,
    reference_update,
    save_adapters,
    save_random_model,
)
from tests.integration.test_learner import make_config, make_minibatch

peft = pytest.importorskip("peft", reason="needs the extra dev")
SOME = Adapters(3, 5.0, ("q_proj", "v_proj", "down_proj"))
CASES = {"qwen2": ADAPTERS, "qwen3": SOME, "llama_biases": ADAPTERS, "granite": SOME, "olmo2": ADAPTERS}
RECOMPUTE: list[dict[str, Any]] = [
    {},
    {"recompute": True},
    {"recompute": True, "recompute_layers": 1},
    {"recompute": True, "recompute_modules": ["core_attn", "mlp"]},
]
LAYOUTS: list[dict[str, Any]] = [
    {"data": 2},
    {"data": 2, "distributed": True, "overlap_communication": True},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2},
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    for family, adapters in CASES.items():
        save_random_model(family, root / family)
        save_adapters(root / family, adapters, root / f"{family}-adapters")
        model = peft.PeftModel.from_pretrained(
            load_float64(root / family), root / f"{family}-adapters", is_trainable=True
        )
        model.double()
        found = reference_update(model, random_batch())
        gradients = {name.removeprefix(PEFT_PREFIX).replace(".default", ""): g for name, g in found.gradients.items()}
        torch.save((gradients, found.grad_norm), root / f"{family}.pt")
    return root


def resolved(
    root: Path,
    family: str,
    layout: dict[str, Any],
    *,
    init: bool = True,
    lora: bool = True,
    kl: bool = False,
    **train: Any,
) -> Resolved:
    config, adapters = make_config(layout, **train).model_dump(exclude_unset=True), CASES[family]
    if lora:
        config["lora"] = {"rank": adapters.rank, "alpha": adapters.alpha, "targets": adapters.targets}
        config["lora"] |= {"init_from": str(root / f"{family}-adapters")} if init else {}
    config["loss"] = {"kl_coef": 0.1 if kl else 0.0}
    return resolve(Config.model_validate(config), root / family)


def difference(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_gradients(rank: int, world_size: int, root: Path, family: str) -> None:
    gradients, norm = torch.load(root / f"{family}.pt")
    for layout in LAYOUTS:
        for train in RECOMPUTE if family == "qwen2" else RECOMPUTE[:2]:
            if layout.get("virtual_pipeline") and "recompute_layers" in train:
                continue
            learner = MegatronLearner(resolved(root, family, layout, **train))
            result = learner.step(make_minibatch(learner, 60, random_batch()), BOUNDS)
            found = dict(learner.named_gradients())
            if rank == 0:
                what = f"{family} {layout} {train}"
                assert found.keys() == gradients.keys(), what
                worst = max((difference(found[name], g), name) for name, g in gradients.items())
                assert worst[0] < TOLERANCE, (what, worst)
                assert abs(result.metrics["optimizer/grad_norm"] - norm) < TOLERANCE * norm, what
            parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family == "llama_biases" else [pytest.mark.slow]) for family in CASES]
)
def test_gradients_are_those_of_peft(root: Path, family: str) -> None:
    run_distributed(check_gradients, 2, root, family)


def log_probs(learner: MegatronLearner) -> list[Tensor]:
    return [found.clone() for found in learner.log_probs(make_minibatch(learner, 60, random_batch()))]


def merged(learner: MegatronLearner) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in learner.weights().whole()}


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def check_weights(rank: int, world_size: int, root: Path) -> None:
    family = "qwen2"
    expected = merged_float64(root / family, root / f"{family}-adapters", CASES[family])
    for layout in LAYOUTS:
        plain = MegatronLearner(resolved(root, family, layout, lora=False))
        of_model = log_probs(plain)
        parallel_state.destroy_model_parallel()
        learner = MegatronLearner(resolved(root, family, layout, init=False))
        assert all_equal(log_probs(learner), of_model), f"B is 0: {layout}"
        parallel_state.destroy_model_parallel()

        learner = MegatronLearner(resolved(root, family, layout))
        trained = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
        buffers = [buffer for chunk in learner.wrapped for buffer in chunk.buffers]
        assert {parameter for buffer in buffers for parameter in buffer.params} == {*trained}
        if not layout.get("distributed"):  # otherwise Megatron pads its buckets
            assert sum(buffer.grad_data.numel() for buffer in buffers) == sum(one.numel() for one in trained)
        before, weights = log_probs(learner), merged(learner)
        assert any(not torch.equal(one, other) for one, other in zip(before, of_model, strict=True)) or not before
        assert all(torch.equal(one, weights[name]) for name, one in merged(learner).items()), "the same bits twice"
        if rank == 0:
            for name, weight in expected.items():
                assert difference(weights[name], weight) < 2e-7, f"{layout}: {name}"
        result = learner.step(make_minibatch(learner, 60, random_batch()), BOUNDS)
        assert result.metrics["optimizer/merged_share"] > 0.9
        minibatch = make_minibatch(learner, 60, random_batch())
        assert all_equal(OwnReference(learner).log_probs(minibatch), before), f"the reference: {layout}"
        after = log_probs(learner)
        assert not after or not all_equal(after, before)
        assert {group["wd_mult"] for group in learner.optimizer.param_groups} == {1.0}, "A and B decay"
        chained = learner.optimizer.chained_optimizers
        state = [one for optimizer in chained for one in optimizer.optimizer.state.values()]
        assert sum(one["exp_avg"].numel() for one in state) <= sum(one.numel() for one in trained)
        parallel_state.destroy_model_parallel()

    learner = MegatronLearner(resolved(root, family, {"tensor": 2}, kl=True))
    assert isinstance(learner.reference, OwnReference)


@pytest.mark.slow
def test_merged_weights_and_the_reference(root: Path) -> None:
    run_distributed(check_weights, 2, root)


def updated(root: Path, layout: dict[str, Any], folder: Path) -> MegatronLearner:
    """Return a learner that has resumed from `folder`, if there is a checkpoint, and has made one more update."""
    learner = MegatronLearner(resolved(root, "qwen2", layout))
    store = CheckpointStore(folder, CheckpointConfig())
    step = 0 if (state := store.resume({"learner": learner})) is None else state["step"]
    learner.step(make_minibatch(learner, 60, random_batch()), BOUNDS)
    store.save(step + 1, {"learner": learner}, {"step": step + 1})
    return learner


def check_saving(rank: int, world_size: int, root: Path) -> None:
    layout = {"tensor": 2, "pipeline": 2, "sequence": True}
    for _ in range(2):
        learner = updated(root, layout, root / "saved")
        parallel_state.destroy_model_parallel()
    learner = MegatronLearner(resolved(root, "qwen2", layout))
    minibatch = make_minibatch(learner, 60, random_batch())
    learner.step(minibatch, BOUNDS)
    learner.step(minibatch, BOUNDS)
    straight = merged(learner)
    parallel_state.destroy_model_parallel()
    resumed = MegatronLearner(resolved(root, "qwen2", layout, init=False))
    CheckpointStore(root / "saved", CheckpointConfig()).resume({"learner": resumed})
    assert all(torch.equal(weight, straight[name]) for name, weight in merged(resumed).items())
    if rank == 0:
        torch.save(straight, root / "straight.pt")


def check_another_layout(rank: int, world_size: int, root: Path) -> None:
    learner = MegatronLearner(resolved(root, "qwen2", {}))
    CheckpointStore(root / "saved", CheckpointConfig()).resume({"learner": learner})
    weights = merged(learner)
    for name, expected in torch.load(root / "straight.pt").items():
        assert difference(weights[name], expected.double()) < 2e-7, name
    parallel_state.destroy_model_parallel()
    save_adapters(root / "qwen2", ADAPTERS, root / "others", seed=4)
    run = resolved(root, "qwen2", {})
    lora = run.config.lora.model_copy(update={"init_from": str(root / "others")})
    learner = MegatronLearner(run.changed(run.config.model_copy(update={"lora": lora})))
    with pytest.raises(CheckpointError, match=r"were in .*qwen2-adapters, and lora\.init_from has others"):
        learner.load(root / "saved" / "step-000002" / "learner")
    parallel_state.destroy_model_parallel()
    shutil.copytree(root / "qwen2", root / "other")
    weights = load_file(root / "qwen2" / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": 1.01 * weights["model.norm.weight"]}, root / "other" / "model.safetensors"
    )
    learner = MegatronLearner(replace(resolved(root, "qwen2", {}), model=ModelFacts.of(root / "other")))
    with pytest.raises(
        CheckpointError, match=r"adapters of the weights that were in .*qwen2, and those in .*other differ"
    ):
        learner.load(root / "saved" / "step-000002" / "learner")


def test_adapters_in_checkpoints_and_conversions(root: Path) -> None:
    """A checkpoint holds adapters alone, in any layout; a PEFT folder and a merged one come from it."""
    run_distributed(check_saving, 4, root)
    run_distributed(check_another_layout, 1, root)
    saved = root / "saved" / "step-000002"
    tensors = read_index(saved / "learner").tensors
    names = set(adapter_tensors(model_shape(load_hf_config(root / "qwen2")).with_adapters(ADAPTERS)))
    assert {part: set(named) for part, named in tensors.items()} == dict.fromkeys((WEIGHT, *MOMENTS), names)

    straight = torch.load(root / "straight.pt")
    convert(saved, root / "merged")
    written = load_file(root / "merged" / "model.safetensors")
    assert written.keys() == straight.keys()
    assert max(difference(written[name], weight.double()) for name, weight in straight.items()) < 2e-7
    convert(saved, root / "peft", to="peft")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        of_peft = peft.PeftModel.from_pretrained(load_float64(root / "qwen2"), root / "peft").double()(ids).logits
        of_merged = load_float64(root / "merged")(ids).logits
        of_base = load_float64(root / "qwen2")(ids).logits
    assert (of_peft.log_softmax(-1) - of_merged.log_softmax(-1)).abs().max() < 1e-5
    assert (of_base - of_merged).abs().max() > 0.01

    (root / "qwen2").rename(root / "moved")
    try:
        with pytest.raises(CheckpointError, match="which is not there: name its folder with bapo convert --base"):
            convert(saved, root / "none")
        convert(saved, root / "merged-again", base=root / "moved")
        assert all(
            torch.equal(w, written[n]) for n, w in load_file(root / "merged-again" / "model.safetensors").items()
        )
        with pytest.raises(CheckpointError, match=r"adapters of other weights"):
            convert(saved, root / "none", base=root / "merged")
    finally:
        (root / "moved").rename(root / "qwen2")


def check_lost_gradients(rank: int, world_size: int, root: Path) -> None:
    learner = MegatronLearner(resolved(root, "qwen2", {"tensor": 2}))
    for adapter in adapters_of(learner.model):
        adapter.register_forward_hook(lambda _, inputs, output: inputs[1] + (output - inputs[1]).detach())
    batch = random_batch()
    without = replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))
    result = learner.step(make_minibatch(learner, 60, without), BOUNDS)
    assert result.metrics["optimizer/grad_norm"] == 0, "no token pushes"
    with pytest.raises(UserError, match="the gradient of every adapter is exactly 0"):
        learner.step(make_minibatch(learner, 60, batch), BOUNDS)


def test_gradients_that_reach_no_adapter_end_the_run(root: Path) -> None:
    run_distributed(check_lost_gradients, 2, root)
