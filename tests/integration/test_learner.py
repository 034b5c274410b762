"""The Megatron learner against a single-process float64 reference, for every kind of layout and batch split."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from bapo_megatron.buffer.packing import Share, one_minibatch
from bapo_megatron.checkpoint.folder import STATE_FORMAT
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.convert import convert
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.policy import transformer_config
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch, MiniBatch
from tests.distributed import HANG_S, run_distributed
from tests.garbage import tensors_in_cycles
from tests.integration.learner_reference import (
    ADAM_EPS,
    BOUNDS,
    FAMILIES,
    LR,
    SEARCH,
    TEMPERATURE,
    VOCAB_SIZE,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)

NUM_UPDATES = 3
TOLERANCE = 1e-5

Case = tuple[str, dict[str, Any], int]  # family, layout, tokens per micro-batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save one checkpoint per family, with what NUM_UPDATES updates of it must give."""
    root = tmp_path_factory.mktemp("learner")
    for family in FAMILIES:
        save_random_model(family, root / family)
        model = load_float64(root / family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.0)
        updates = [
            dataclasses.asdict(reference_update(model, random_batch(), optimizer, version=version))
            for version in range(NUM_UPDATES)
        ]
        torch.save({"updates": updates, "weights": dict(model.named_parameters())}, root / f"{family}.pt")
    return root


def make_config(layout: dict[str, Any], **train: Any) -> Config:
    """Return a configuration; `layout` is [parallel] and, as `distributed`, the kind of optimizer."""
    parallel = {name: value for name, value in layout.items() if name != "distributed"}
    return Config.model_validate(
        {
            "parallel": {"timeout_s": HANG_S, **parallel},
            "rollout": {"temperature": TEMPERATURE},
            "optimizer": {
                "lr": LR,
                "eps": ADAM_EPS,
                "clip_grad": 1e9,
                "distributed": layout.get("distributed", False),
            },
            "bapo": SEARCH.model_dump(),
            "train": {"logprob_chunk_tokens": 13, **train},
            "monitor": {"token_profile": True},
        }
    )


def make_minibatch(learner: MegatronLearner, max_tokens: int, batch: Batch) -> MiniBatch:
    return one_minibatch(batch, max_tokens=max_tokens, share=learner.share)


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def check_log_probs(learner: MegatronLearner, log_probs: list[Tensor], minibatch: MiniBatch, want: Any) -> None:
    if not learner.layout.is_last_stage:
        assert log_probs == []
        return
    for log_probs_R, micro in zip(log_probs, minibatch.micro_batches, strict=True):
        assert_close(log_probs_R, want["log_probs_T"][-micro.versions_R], "log-probs")


def make_finders(learner: MegatronLearner) -> dict[str, BoundsFinder]:
    """Return one search per scope, all fed by one learner."""
    bapo = learner.config.bapo
    return {
        scope: BoundsFinder(
            learner.config.model_copy(update={"bapo": bapo.model_copy(update={"scope": scope})}), learner
        )
        for scope in ("exact", "lagged", "fixed")
    }


def check_bounds(finders: dict[str, BoundsFinder], minibatch: MiniBatch, now: Any, before: Any) -> None:
    """On every rank, exact bounds belong to the update itself, and lagged bounds to the update before."""
    for scope, (low, high, share) in (("exact", now), ("lagged", before)):
        bounds = finders[scope].find(minibatch)
        assert (bounds.low, bounds.high) == (low, high), scope
        assert bounds.positive_share == pytest.approx(share, abs=TOLERANCE), scope
    fixed = finders["fixed"].find(minibatch)
    assert (fixed.low, fixed.high, fixed.num_moves) == (SEARCH.low.start, SEARCH.high.start, 0)


def check_layout(folder: Path, family: str, layout: dict[str, Any], max_tokens: int, **train: Any) -> None:
    """Compare all updates of one learner with the reference: log-probs, bounds, loss, metrics, gradient, weights."""
    reference = torch.load(folder / f"{family}.pt", weights_only=True)
    original = load_file(folder / family / "model.safetensors")
    learner = MegatronLearner(resolve(make_config(layout, **train), folder / family))
    batch = random_batch()
    minibatch = make_minibatch(learner, max_tokens, batch)
    is_rank_0 = learner.layout.rank == 0

    for name, tensor in learner.weights().whole():
        assert torch.equal(tensor, original.pop(name)) if is_rank_0 else tensor.numel() == 0, name
    assert not is_rank_0 or not original

    finders = make_finders(learner)
    before = reference["updates"][0]  # the first lagged search has no earlier update
    batch_counts = [int((batch.mask_T & (sign * batch.advantages_T > 0)).sum()) for sign in (1, -1)]
    for version, want in enumerate(reference["updates"]):
        assert learner.version == version
        check_log_probs(learner, learner.log_probs(minibatch), minibatch, want)
        check_bounds(finders, minibatch, want["bounds"], before["bounds"])
        result = learner.step(minibatch, BOUNDS)
        finders["lagged"].observe(minibatch, result.log_probs)
        assert finders["lagged"].state_dict()["lagged"][-2:] == batch_counts  # each token once, whatever the layout
        before = want
        for name, value in want["metrics"].items():
            assert result.metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
        check_log_probs(learner, result.log_probs, minibatch, want)
        assert result.metrics["loss/policy"] == pytest.approx(want["loss"], rel=TOLERANCE, abs=TOLERANCE)
        assert result.metrics["optimizer/grad_norm"] == pytest.approx(want["grad_norm"], rel=TOLERANCE)
        for name, gradient in learner.named_gradients():
            if is_rank_0:
                assert_close(gradient, want["gradients"][name], f"update {version}, gradient of {name}")
    for name, weight in learner.weights().whole():
        if is_rank_0:
            assert_close(weight, reference["weights"][name], f"weight {name} after {NUM_UPDATES} updates")
    parallel_state.destroy_model_parallel()


def check_layouts(rank: int, world_size: int, folder: Path, cases: list[Case]) -> None:
    for family, layout, max_tokens in cases:
        try:
            check_layout(folder, family, layout, max_tokens)
        except AssertionError as error:
            raise AssertionError(f"{family}, {layout}, {max_tokens} tokens per micro-batch") from error


def check_cycles(root: Path) -> None:
    """Garbage collections are rare in a rank, so no tensor may depend on one."""
    learner = MegatronLearner(resolve(make_config({}), root / "qwen3"))
    minibatch = make_minibatch(learner, 60, random_batch())
    assert tensors_in_cycles(lambda: (learner.score(minibatch), learner.step(minibatch, BOUNDS))) == []
    parallel_state.destroy_model_parallel()


def check_one_process(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    check_layouts(rank, world_size, root, cases)
    check_cycles(root)
    check_refusals(root)


def test_one_process_equals_reference_and_refuses_impossible_settings(folder: Path) -> None:
    cases: list[Case] = [(family, {}, max_tokens) for family in FAMILIES for max_tokens in (1000, 50)]
    run_distributed(check_one_process, 1, folder, cases)


@pytest.mark.slow
def test_two_processes_equal_reference(folder: Path) -> None:
    """test_layouts.py compares two families in more layouts with one process."""
    cases: list[Case] = [
        ("qwen3", {"tensor": 2, "sequence": True}, 60),
        ("qwen3", {"data": 2}, 60),
        ("qwen2", {"pipeline": 2}, 1000),
        ("llama", {"tensor": 2}, 60),
        ("llama", {"pipeline": 2}, 60),
        ("llama_biases", {"tensor": 2, "sequence": True}, 60),
        ("granite", {"tensor": 2, "sequence": True}, 60),
        ("granite", {"context": 2}, 30),
        ("olmo2", {"tensor": 2}, 60),
        ("olmo2", {"tensor": 2, "sequence": True}, 60),
        ("smollm3", {"pipeline": 2, "virtual_pipeline": 2}, 60),
        ("smollm3", {"context": 2}, 30),
        ("qwen3", {"context": 2}, 30),
        ("qwen2", {"pipeline": 2, "virtual_pipeline": 2}, 60),
        ("qwen2", {"data": 2, "distributed": True}, 60),
    ]
    run_distributed(check_layouts, 2, folder, cases)


def check_fewer_sequences_than_ranks(rank: int, world_size: int, root: Path) -> None:
    """With one sequence, some packs, or some ranks' parts of a pack, hold no response row at all."""
    batch = random_batch(num_sequences=1)
    want = reference_update(load_float64(root / "qwen3"), batch)
    for layout in ({"data": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"context": 2}):
        learner = MegatronLearner(resolve(make_config(layout), root / "qwen3"))
        minibatch = make_minibatch(learner, 60, batch)
        finder = make_finders(learner)["exact"]
        bounds = finder.find(minibatch)
        assert (bounds.low, bounds.high) == want.bounds[:2], layout
        metrics = learner.step(minibatch, BOUNDS).metrics
        assert metrics["loss/policy"] == pytest.approx(want.loss, rel=TOLERANCE), layout
        assert metrics["optimizer/grad_norm"] == pytest.approx(want.grad_norm, rel=TOLERANCE), layout
        if "context" in layout:
            learner.share = Share()
            with pytest.raises(AssertionError, match="packed for other context ranks"):
                learner.step(make_minibatch(learner, 60, batch), BOUNDS)
        parallel_state.destroy_model_parallel()


def test_fewer_sequences_than_ranks(folder: Path) -> None:
    run_distributed(check_fewer_sequences_than_ranks, 2, folder)


@pytest.mark.slow
def test_four_processes_equal_reference(folder: Path) -> None:
    cases: list[Case] = [
        ("qwen2", {"tensor": 2, "pipeline": 2, "sequence": True}, 60),
        ("llama", {"tensor": 2, "pipeline": 2}, 1000),
    ]
    run_distributed(check_layouts, 4, folder, cases)


def check_resume(rank: int, world_size: int, root: Path, model: str, layouts: list[dict[str, Any]]) -> None:
    """After two updates, a save and a load at each layout, the third update's loss and weights match the reference."""
    store = CheckpointStore(root / f"saved-{model}", CheckpointConfig())
    reference = torch.load(root / f"{model}.pt", weights_only=True)
    for number, layout in enumerate(layouts):
        learner = MegatronLearner(resolve(make_config(layout), root / model))
        minibatch = make_minibatch(learner, 60, random_batch())
        if number == 0:
            for _ in range(NUM_UPDATES - 1):
                learner.step(minibatch, BOUNDS)
            store.save(1, {"learner": learner}, None)
        else:
            state = store.resume({"learner": learner})
            assert state is not None
            assert state.pop("parts").keys() == {"learner"}
            assert state == {"format": STATE_FORMAT, "step": 1}
        assert learner.version == NUM_UPDATES - 1
        result = learner.step(minibatch, BOUNDS)
        assert result.metrics["loss/policy"] == pytest.approx(reference["updates"][-1]["loss"], rel=TOLERANCE)
        for name, weight in learner.weights().whole():
            if rank == 0:
                assert_close(weight, reference["weights"][name], f"{layout}: {name} after the resumed update")
        parallel_state.destroy_model_parallel()


@pytest.mark.slow
def test_resume_at_another_layout(folder: Path) -> None:
    layouts = [{"tensor": 2}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}]
    run_distributed(check_resume, 2, folder, "llama", layouts)
    convert(folder / "saved-llama" / "step-000001", folder / "exported-llama")
    assert load_float64(folder / "exported-llama").state_dict(), "transformers loads what is exported"


def check_broken_gradient(rank: int, world_size: int, root: Path, distributed: bool = False) -> None:
    """After a nan advantage on one data rank, no rank changes its weights, all count it, and the next update works."""
    learner = MegatronLearner(resolve(make_config({"data": 2, "distributed": distributed}), root / "qwen2"))
    minibatch = make_minibatch(learner, 60, random_batch())
    before = {name: weight.clone() for name, weight in learner.weights().whole()}
    broken = minibatch
    if learner.layout.data_rank == 1:
        micro = minibatch.micro_batches[0]
        advantages_R = torch.where(micro.mask_R, torch.nan, micro.advantages_R)
        micro = dataclasses.replace(micro, advantages_R=advantages_R)
        broken = dataclasses.replace(minibatch, micro_batches=(micro, *minibatch.micro_batches[1:]))
    metrics = learner.step(broken, BOUNDS).metrics
    assert metrics["optimizer/skipped"] == 1.0
    assert not math.isfinite(metrics["optimizer/grad_norm"])
    for name, weight in learner.weights().whole():
        assert torch.equal(weight, before[name]), name

    metrics = learner.step(minibatch, BOUNDS).metrics
    reference = torch.load(root / "qwen2.pt", weights_only=True)["updates"][0]
    assert metrics["optimizer/skipped"] == 1.0
    assert metrics["optimizer/grad_norm"] == pytest.approx(reference["grad_norm"], rel=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check_sums_reach_all_ranks(rank: int, world_size: int, root: Path) -> None:
    """A table lives on the last stage of each data rank; its sum arrives on both stages."""
    learner = MegatronLearner(resolve(make_config({"pipeline": 2}), root / "qwen2"))
    table = torch.full((2, 3), 1.5 if learner.layout.is_last_stage else 7.0, dtype=torch.float64)
    assert torch.equal(learner.sum_over_data_ranks(table), torch.full((2, 3), 1.5, dtype=torch.float64))
    parallel_state.destroy_model_parallel()
    learner = MegatronLearner(resolve(make_config({"data": 2}), root / "qwen2"))
    table = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)
    assert learner.sum_over_data_ranks(table).tolist() == [3.0, 30.0]
    parallel_state.destroy_model_parallel()


def check_options(rank: int, world_size: int, root: Path) -> None:
    """Recomputation changes nothing; clipping, warm-up and the entropy bonus do what they promise."""
    check_layout(root, "qwen3", {"tensor": 2}, 60, recompute=True)

    config = make_config({"tensor": 2})
    optimizer = config.optimizer.model_copy(update={"clip_grad": 1e-3, "warmup_updates": 4})
    learner = MegatronLearner(resolve(config.model_copy(update={"optimizer": optimizer}), root / "qwen3"))
    minibatch = make_minibatch(learner, 60, random_batch())
    rates = []
    for _ in range(5):
        rates.append(learner.step(minibatch, BOUNDS).metrics["optimizer/lr"])
        norm = torch.stack([g.norm() for _, g in learner.named_gradients()]).norm()
        assert rank > 0 or float(norm) == pytest.approx(1e-3, rel=1e-3)
    assert rates == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR, LR])
    parallel_state.destroy_model_parallel()

    learner = MegatronLearner(resolve(make_config({"tensor": 2}, entropy_coef=0.3), root / "qwen3"))
    learner.step(minibatch, BOUNDS)
    model = load_float64(root / "qwen3")
    reference_update(model, random_batch(), entropy_coef=0.3)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in learner.named_gradients():
        if rank == 0:
            assert_close(gradient, wanted[name], f"gradient of {name} with an entropy bonus")
    parallel_state.destroy_model_parallel()


def check_two_process_details(rank: int, world_size: int, root: Path) -> None:
    for check in (
        check_broken_gradient,
        partial(check_broken_gradient, distributed=True),
        check_sums_reach_all_ranks,
        check_options,
    ):
        check(rank, world_size, root)


@pytest.mark.slow
def test_details(folder: Path) -> None:
    run_distributed(check_two_process_details, 2, folder)


def check_refusals(root: Path) -> None:
    """Errors name impossible settings, and settings that work."""
    for layout, message in (
        ({"tensor": 4}, "parallel.tensor=4 does not divide 2 key-value heads; parallel.tensor can be 1 or 2"),
        ({"context": 2}, "1 trainer process started, but"),
        (
            {"pipeline": 2, "virtual_pipeline": 4},
            "parallel.virtual_pipeline=4 does not divide the 2 layers of a stage; it can be 1 or 2",
        ),
        ({"tensor": 2}, "1 trainer process started, but"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            MegatronLearner(resolve(make_config(layout), root / "qwen3"))
    batched = {"batch_p2p_comm": True, "overlap_p2p_comm": False}
    config = make_config({"pipeline": 2, "virtual_pipeline": 2})
    config = config.model_copy(update={"megatron": config.megatron.model_copy(update={"extra": batched})})
    with pytest.raises(ConfigError, match="mix up their messages"):
        transformer_config(model_shape(load_hf_config(root / "qwen3")), config)
    config = make_config({})
    extra = config.megatron.model_copy(update={"extra": {"num_layrs": 3}})
    with pytest.raises(ConfigError, match="num_layrs: not a field"):
        MegatronLearner(resolve(config.model_copy(update={"megatron": extra}), root / "qwen3"))


def check_flops(rank: int, world_size: int, root: Path) -> None:
    """Compare `perf/tflop` with torch's count of one update; PyTorch's plain attention computes both halves."""
    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False)).save_pretrained(root)
    learner = MegatronLearner(resolve(make_config({}, logprob_chunk_tokens=512), root))
    batch = random_batch()
    minibatch = make_minibatch(learner, 10_000, batch)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        metrics = learner.step(minibatch, BOUNDS).metrics
    counted = counter.get_total_flops()
    tokens = minibatch.counts
    assert tokens.tokens == int(batch.seq_lens_S.sum())
    layers, output = learner.shape.forward_flops(tokens.tokens, 2 * tokens.squares, tokens.responses)
    assert 3 * layers + 4 * output == pytest.approx(counted, rel=0.02), "logits are computed again in the backward pass"
    assert 1e12 * metrics["perf/tflop"] == pytest.approx(counted, rel=0.1)


def test_flops_are_those_of_the_counter(tmp_path: Path) -> None:
    run_distributed(check_flops, 1, tmp_path)
