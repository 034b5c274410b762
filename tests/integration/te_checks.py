"""What test_transformer_engine.py checks in processes that have Transformer Engine's Python code (te_stand_ins.py).

Import this after `te_stand_ins.install`.
"""

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine_torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from safetensors.torch import load_file
from torch import Tensor
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.optimizers import FusedAdam

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig
from bapo_megatron.hf.adapters import PEFT_PREFIX
from bapo_megatron.hf.peft import WEIGHTS
from bapo_megatron.learner import megatron, packs, policy, split_model
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.precision import Machine
from bapo_megatron.resolved import resolve
from bapo_megatron.types import ClipBounds, MiniBatch
from tests.integration.learner_reference import (
    ADAPTERS,
    HYBRID,
    HYBRID_MIXTURE,
    MIXTURE,
    Reference,
    forest_batch,
    literal_loss,
    load_float64,
    merged_float64,
    random_batch,
    reference_update,
)
from tests.integration.learner_updates import make_config, pack
from tests.integration.te_stand_ins import CALLS, HOPPER
from tests.integration.test_no_waiting import Reads, watching
from tests.integration.test_overlap_communication import SmallBuckets

WIDE = ClipBounds(low=0.0, high=1e3, positive_share=0.5, saturated=False, num_moves=0)  # rounding clips no token
CPU, GPU = Machine(), Machine(HOPPER, (13, 0), (2, 11, 0), fla=(0, 6, 0))
NUM_LAYERS, LINEARS_OF_A_LAYER = 4, 4  # queries, keys and values; attention's output; gate and up; down
RECIPES = {"tensorwise": "float8_current_scaling", "blockwise": "float8_block_scaling", "delayed": "delayed"}


@dataclass
class Outcome:
    """An update: log-probs before it, on the last stage; gradients by name, on rank 0; their norm."""

    log_probs: list[Tensor]
    gradients: dict[str, Tensor]
    grad_norm: float


@contextlib.contextmanager
def engine_learner(folder: Path, **sections: Any) -> Iterator[MegatronLearner]:
    """Build a learner in bfloat16 with what a Hopper GPU has; then leave the groups."""
    megatron.this_machine = policy.this_machine = lambda: GPU
    dtype = {"dtype": "bfloat16", "implementation": "transformer_engine"}
    yield MegatronLearner(resolve(make_config(model=dtype, **sections), folder))
    parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def local_learner(folder: Path, **sections: Any) -> Iterator[MegatronLearner]:
    """Build a learner in bfloat16 with local layers and no fused kernel; then leave the groups."""
    megatron.this_machine, policy.this_machine = lambda: GPU, lambda: CPU
    dtype = {"dtype": "bfloat16", "implementation": "local"}
    yield MegatronLearner(resolve(make_config(model=dtype, **sections), folder))
    parallel_state.destroy_model_parallel()


def update(learner: MegatronLearner, *, scored: bool = True) -> Outcome:
    minibatch = pack(learner)
    if scored:
        learner.score(minibatch)
    CALLS.clear()
    result = learner.step(minibatch, WIDE)
    gradients = {name: gradient.clone() for name, gradient in learner.named_gradients()}
    return Outcome(result.log_probs, gradients, result.metrics["optimizer/grad_norm"])


@functools.cache
def reference(folder: Path) -> Reference:
    """Compute the update in float64 with transformers, one sequence at a time."""
    return reference_update(load_float64(folder), random_batch(), loss_of=partial(literal_loss, bounds=WIDE))


def expected(learner: MegatronLearner, exact: Reference | None = None) -> Outcome:
    """Return the reference's values that this rank has to find."""
    exact = exact or reference(learner.hf_path)
    rows = [batch.batch_rows_R for batch in pack(learner).micro_batches if learner.layout.is_last_stage]
    gradients = {name: g if learner.layout.rank == 0 else g.new_empty(0) for name, g in exact.gradients.items()}
    return Outcome([exact.log_probs_T[rows_R] for rows_R in rows], gradients, exact.grad_norm)


def distances(one: Outcome, other: Outcome) -> tuple[float, float]:
    """Return the mean difference of log-probs in nats and 1 - cosine of gradients; 0 if another rank has them."""
    log_probs = [torch.cat(o.log_probs) if o.log_probs else torch.zeros(1) for o in (one, other)]
    assert one.gradients.keys() == other.gradients.keys()
    gradients = [torch.cat([o.gradients[name].flatten().double() for name in one.gradients]) for o in (one, other)]
    cosine = torch.cosine_similarity(*gradients, dim=0) if gradients[0].numel() else 1.0
    return float((log_probs[0] - log_probs[1]).abs().mean()), 1 - float(cosine)


def check_near(case: str, one: Outcome, exact: Outcome, *, of_adapters: bool = False) -> tuple[float, float]:
    """Check that an update in bfloat16 is near the exact one; return their distances."""
    found = of_log_probs, of_gradients = distances(one, exact)
    print(f"{case}: log-probs differ by {of_log_probs:.2g} on average, 1 - cosine of gradients is {of_gradients:.2g}")
    assert of_log_probs < 0.02
    assert of_gradients < (4e-3 if of_adapters else 1e-3)  # an adapter rounds once more on its way
    assert math.isclose(one.grad_norm, exact.grad_norm, rel_tol=0.03)
    return found


def check_same(one: Outcome, other: Outcome) -> None:
    """Check that two updates are equal bit for bit."""
    torch.testing.assert_close(vars(one), vars(other), rtol=0, atol=0)


def check_layers(learner: MegatronLearner) -> None:
    """Check that all linears are Transformer Engine's, and add their weight gradients to the float32 buffers."""
    linears = [module for module in learner.model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    names = {re.sub("Biased|Finished", "", type(linear).__name__) for linear in linears}
    before = "TEColumnParallelLinear" if learner.shape.family == "olmo2" else "TELayerNormColumnParallelLinear"
    assert names == {before, "TERowParallelLinear"}
    assert len(linears) == NUM_LAYERS * LINEARS_OF_A_LAYER / learner.layout.pipeline_size
    assert all(linear.fuse_wgrad_accumulation for linear in linears)


def check_weights(learner: MegatronLearner, folder: Path) -> None:
    """Check that the weights leave with the names and values that the Hugging Face checkpoint has."""
    (file,) = folder.glob("*.safetensors")
    original, own = load_file(file), dict(learner.weights().whole())
    assert own.keys() == original.keys()
    if learner.layout.rank == 0:  # the others get empty tensors
        for name, weight in original.items():
            assert torch.equal(own[name], weight.to(torch.bfloat16)), name


def check_calls(minibatch: MiniBatch, *, overwrites: bool) -> None:
    """Check what an update asked of the kernels: causal packs, weight gradients in float32, one norm, one Adam.

    Args:
        overwrites: the first micro-batch's weight gradients overwrite the buffers, and are not added to zeros.
    """
    num_packs, num_linears = len(minibatch.micro_batches), NUM_LAYERS * LINEARS_OF_A_LAYER
    facts = {name: [call.facts for call in CALLS if call.name == name] for name in {call.name for call in CALLS}}
    of_weights = [f for f in facts["generic_gemm"] if f["layout"] == "NT"]
    assert {f["into"] for f in of_weights} == {torch.float32}
    assert [f["accumulate"] for f in of_weights[:num_linears]] == [not overwrites] * num_linears
    assert [f["accumulate"] for f in of_weights[num_linears:]] == [True] * num_linears * (num_packs - 1)
    assert facts["fused_attn_bwd"] == [{"deterministic": False}] * NUM_LAYERS * num_packs
    assert max(f["num_tensors"] for f in facts["multi_tensor_l2norm"]) > num_linears, "the gradients' norm"
    assert {f["step"] for f in facts["multi_tensor_adam"]} == {1}


def check_resume(folder: Path, saved: Path, **sections: Any) -> Outcome:
    """Check that an update after a resume equals the uninterrupted one; return the first update, without a score."""
    store = CheckpointStore(saved, CheckpointConfig())
    with engine_learner(folder, **sections) as learner:
        (one,) = learner.optimizer.chained_optimizers
        assert type(one.optimizer) is FusedAdam
        first = update(learner, scored=False)
        store.save(1, {"learner": learner}, {})
        second = update(learner)
        assert {group["step"] for group in one.optimizer.param_groups if group["params"]} == {2}
        weights = {name: weight.clone() for name, weight in learner.weights().whole()}
    with engine_learner(folder, **sections) as learner:
        assert store.resume({"learner": learner}) is not None
        check_same(update(learner), second)
        torch.testing.assert_close(dict(learner.weights().whole()), weights, rtol=0, atol=0)
    store.close()
    return first


def check_families(root: Path, families: Sequence[str]) -> None:
    """Compare updates with transformers; Transformer Engine's layers are about as near as local ones in bfloat16."""
    for family in families:
        with local_learner(root / family) as learner:
            local, exact = update(learner), expected(learner)
        with engine_learner(root / family) as learner:
            check_layers(learner)
            check_weights(learner, root / family)
            engine = update(learner)
        of_local = check_near(f"{family}, local layers", local, exact)
        of_engine = check_near(f"{family}, Transformer Engine", engine, exact)
        assert all(mine < 1.5 * other for mine, other in zip(of_engine, of_local, strict=True))
        check_near(f"{family}, one to the other", engine, local)


def check_shared_prompts(root: Path, **sections: Any) -> None:
    """Compare an update whose packs hold prompts once with transformers, and with whole sequences."""
    batch, exact = forest_batch(), None
    train = {"max_tokens_per_microbatch": 60}
    found = []
    for shares in (False, True):
        with engine_learner(root / "qwen3", train=train | {"share_prompts": shares}, **sections) as learner:
            exact = exact or reference_update(
                load_float64(learner.hf_path), batch, loss_of=partial(literal_loss, bounds=WIDE)
            )
            minibatch = one_minibatch(batch, max_tokens=60, share=learner.share)
            assert (minibatch.counts.saved > 0) == shares
            CALLS.clear()
            result = learner.step(minibatch, WIDE)
            forwards = [call.facts["has_more_keys"] for call in CALLS if call.name == "fused_attn_fwd"]
            assert any(forwards) == shares
            rows = [one.batch_rows_R for one in minibatch.micro_batches if learner.layout.is_last_stage]
            gradients = {name: gradient.clone() for name, gradient in learner.named_gradients()}
            mine = Outcome(result.log_probs, gradients, result.metrics["optimizer/grad_norm"])
            of_rank = {name: g if learner.layout.rank == 0 else g.new_empty(0) for name, g in exact.gradients.items()}
            wanted = Outcome([exact.log_probs_T[rows_R] for rows_R in rows], of_rank, exact.grad_norm)
            found.append(check_near(f"shared prompts: {shares}", mine, wanted))
    assert all(mine <= 1.5 * other for mine, other in zip(found[1], found[0], strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "sharing_problem", lambda *_: "it fails")
        with engine_learner(root / "qwen3", train=train | {"share_prompts": True}, **sections) as learner:
            assert "it fails" in (learner.sharing_problem or "")
            assert one_minibatch(batch, max_tokens=60, share=learner.share).counts.saved == 0


def check_mixture(root: Path, **sections: Any) -> None:
    """Compare an update of experts in grouped linears with transformers, and let the weights leave as they came."""
    with engine_learner(root / MIXTURE, **sections) as learner:
        check_grouped(learner, root / MIXTURE)
        exact = expected(learner)
        check_near("experts in grouped linears", update(learner), exact)


def check_grouped(learner: MegatronLearner, folder: Path) -> None:
    kinds = {type(module).__name__ for module in learner.model.modules()}
    assert {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"} <= kinds
    check_weights(learner, folder)


def check_hybrid_mixture(root: Path, **sections: Any) -> None:
    """Compare experts and a shared one with transformers: they are about as near as local layers, which in bfloat16
    send some tokens to other experts than float64 does."""
    with local_learner(root / HYBRID_MIXTURE, **sections) as learner:
        local, exact = update(learner), expected(learner)
    with engine_learner(root / HYBRID_MIXTURE, **sections) as learner:
        check_grouped(learner, root / HYBRID_MIXTURE)
        engine = update(learner)
    (of_local, local_cosine), (of_engine, engine_cosine) = distances(local, exact), distances(engine, exact)
    print(f"a shared expert: {of_engine:.2g} and {engine_cosine:.2g}, local {of_local:.2g} and {local_cosine:.2g}")
    assert of_engine < 1.5 * of_local < 0.1
    assert engine_cosine <= 1.5 * local_cosine < 0.02


def check_hybrid(root: Path, **sections: Any) -> None:
    """Compare an update of linear and full attention with transformers, and let the weights leave as they came."""
    with engine_learner(root / HYBRID, **sections) as learner:
        kinds = [type(module).__name__ for module in learner.model.modules()]
        linear, full = kinds.count("GatedDeltaNet"), kinds.count("SelfAttention")
        assert kinds.count("TEColumnParallelLinear") == linear == full
        assert kinds.count("TELayerNormColumnParallelLinear") == full + (linear + full), "queries; gate and up"
        check_weights(learner, root / HYBRID)
        exact = expected(learner)
        check_near("linear and full attention", update(learner), exact)


def reference_with_adapters(model: Path, folder: Path) -> Reference:
    """Compute the update of adapters in float64: their gradients follow from the gradient of the merged weight."""
    merged = load_float64(model)
    merged.load_state_dict(merged_float64(model, folder, ADAPTERS), strict=False)  # tied weights have one name
    exact = reference_update(merged, random_batch(), loss_of=partial(literal_loss, bounds=WIDE))
    saved = {name.removeprefix(PEFT_PREFIX): one.double() for name, one in load_file(folder / WEIGHTS).items()}
    gradients = {}
    for name, b in saved.items():
        layer, _, kind = name.rpartition("lora_")
        if kind == "B.weight":
            of_weight = ADAPTERS.scale * exact.gradients[f"{layer}weight"]
            gradients[f"{layer}lora_A.weight"] = b.T @ of_weight
            gradients[name] = of_weight @ saved[f"{layer}lora_A.weight"].T
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return replace(exact, gradients=gradients, grad_norm=norm)


def check_adapters(root: Path, family: str, **sections: Any) -> None:
    """Compare an update of adapters with transformers: they must see the normed input, so no norm may be fused."""
    folder = root / f"{family}-adapters"
    lora = {"rank": ADAPTERS.rank, "alpha": ADAPTERS.alpha, "init_from": str(folder)}
    with local_learner(root / family, lora=lora, **sections) as learner:
        local, exact = update(learner), expected(learner, reference_with_adapters(root / family, folder))
    with engine_learner(root / family, lora=lora, **sections) as learner:
        kinds = {re.sub("Biased|Finished", "", type(module).__name__) for module in learner.model.modules()}
        assert {"AdaptedTEColumnParallelLinear", "AdaptedTERowParallelLinear"} <= kinds
        assert not any("LayerNormColumn" in kind for kind in kinds)
        engine = update(learner)
    case = f"{family}, adapters, {sections}"
    of_local = check_near(f"{case}, local layers", local, exact, of_adapters=True)
    of_engine = check_near(f"{case}, Transformer Engine", engine, exact, of_adapters=True)
    assert all(mine < 2 * other + 1e-6 for mine, other in zip(of_engine, of_local, strict=True))


def check_schedules(root: Path) -> None:
    """Check that updates are the same in each order of passes, whatever is overwritten or computed again."""
    cases: list[tuple[dict[str, Any], bool, bool]] = [  # [train], a scoring pass comes first, the first pass overwrites
        ({}, True, False),
        ({}, False, True),
        ({"schedule": "forwards_first"}, True, True),
        ({"recompute": True}, False, False),  # the pass without a graph was the first
    ]
    outcomes = []
    for train, scored, overwrites in cases:
        with engine_learner(root / "qwen3", train=train) as learner:
            outcomes.append(update(learner, scored=scored))
            check_calls(pack(learner), overwrites=overwrites)
        check_same(outcomes[-1], outcomes[0])


def check_fixed_order(root: Path) -> None:
    """Check that `run.deterministic` leaves attention to torch, and nothing else."""
    with engine_learner(root / "qwen3") as learner:
        usual = update(learner)
        by_engine = {call.name for call in CALLS}
    with engine_learner(root / "qwen3", run={"deterministic": True}) as learner:
        check_layers(learner)
        check_near("qwen3, in a fixed order", update(learner), usual)
        assert by_engine - {call.name for call in CALLS} == {"fused_attn_fwd", "fused_attn_bwd"}


def check_waits(root: Path) -> None:
    """Check that neither Transformer Engine nor Megatron reads from the device in an update's passes."""
    reads = Reads()
    apart = [(transformer_engine_torch, "fused_attn_fwd"), (transformer_engine_torch, "fused_attn_bwd")]
    apart += [(packs.PackedSequences, "for_transformer_engine")]  # made of CPU tensors
    with pytest.MonkeyPatch.context() as patch, watching(reads, *apart):
        # it compares the states of the CPU's generator
        patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        with engine_learner(root / "qwen3") as learner:
            update(learner)
    assert not reads.found, reads.found


def check_fp8(root: Path) -> None:
    """Build FP8 layers, and the quantisers of each, with every recipe."""
    for recipe, name in RECIPES.items():
        with engine_learner(root / "qwen3", precision={"fp8": "hybrid", "recipe": recipe}) as learner:
            check_layers(learner)
            check_weights(learner, root / "qwen3")
            with get_fp8_context(learner.settings):
                assert getattr(FP8GlobalStateManager.get_fp8_recipe(), name)()
                for linear in learner.model.modules():
                    if hasattr(linear, "fuse_wgrad_accumulation"):
                        linear.init_fp8_metadata()


def check_one_process(rank: int, world_size: int, root: Path) -> None:
    check_families(root, ("qwen3", "qwen2", "llama_biases", "gemma"))
    check_mixture(root)
    check_hybrid(root)
    for family in ("qwen3", "llama_biases", "gemma"):
        check_adapters(root, family)
    check_schedules(root)
    check_fixed_order(root)
    check_waits(root)
    for distributed in (False, True):
        check_resume(root / "qwen2", root / f"saved-{distributed}", distributed=distributed)
    check_fp8(root)


def check_other_layers(rank: int, world_size: int, root: Path) -> None:
    check_shared_prompts(root)
    check_families(root, ("granite", "olmo2", "smollm3"))
    for family in ("granite", "olmo2", "smollm3"):
        check_adapters(root, family)


def check_two_processes(rank: int, world_size: int, root: Path) -> None:
    """Compare layouts with transformers, and with and without a scoring pass; resume."""
    split_model.DistributedDataParallelConfig = SmallBuckets  # type: ignore[misc]
    for check in (check_mixture, check_hybrid_mixture):
        check(root, parallel={"data": 2, "expert": 2}, distributed=True)
        check(root, parallel={"tensor": 2, "sequence": True})
    for sequence in (False, True):
        check_hybrid(root, parallel={"tensor": 2, "sequence": sequence})
    check_hybrid(root, parallel={"pipeline": 2})
    check_shared_prompts(root, parallel={"tensor": 2, "sequence": True})
    for sequence in (False, True):
        check_adapters(root, "qwen3", parallel={"tensor": 2, "sequence": sequence})
    cases: list[tuple[str, dict[str, Any]]] = [
        ("qwen3", {"tensor": 2, "sequence": True}),
        ("llama_biases", {"tensor": 2, "sequence": True}),
        ("qwen2", {"pipeline": 2}),
        ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}),
        ("qwen2", {"data": 2, "overlap_communication": True}),
    ]
    for number, (family, parallel) in enumerate(cases):
        sections = {"parallel": parallel, "distributed": "data" in parallel}
        with engine_learner(root / family, **sections) as learner:
            check_layers(learner)
            check_weights(learner, root / family)
            scored = update(learner)
            check_near(f"{family}, {parallel}, rank {rank}", scored, expected(learner))
        train = {"recompute": True}
        check_same(check_resume(root / family, root / f"saved-{number}", train=train, **sections), scored)
        if "pipeline" in parallel:  # without recomputation, the first pass overwrites gradients
            with engine_learner(root / family, **sections) as learner:
                check_same(update(learner, scored=False), scored)
