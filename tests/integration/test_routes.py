"""Replay of routes against transformers with the same routes forced, in many layouts; a wrong count ends the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor
from torch.nn import Module

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.packs import PackedSequences, PackRoutes
from bapo_megatron.learner.replay import LayerRoutes
from bapo_megatron.resolved import resolve
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Batch, MiniBatch
from tests.distributed import run_distributed
from tests.integration.layouts import CP, DP, EP, PP, SP, VPP, Layout
from tests.integration.learner_reference import (
    BOUNDS,
    HYBRID_MIXTURE,
    MIXTURE,
    TEMPERATURE,
    Reference,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)

LAYOUTS = (
    Layout("one process, forwards first", schedule="forwards_first"),
    Layout("recompute, forwards first", recompute=True, schedule="forwards_first"),
    Layout("EP2, recompute, interleaved", DP | EP, recompute=True, schedule="interleaved"),
    Layout("CP2 x EP2", CP | EP),
    Layout("TP2 + SP x EP2, distributed optimizer", SP | EP, distributed=True),
    Layout("PP2", PP),
    Layout("PP2 x VPP2 x EP2, recompute", VPP | DP | EP, recompute=True),
)
HYBRID_LAYOUTS = (
    Layout("one process, forwards first", schedule="forwards_first"),
    Layout("EP2, recompute, interleaved", DP | EP, recompute=True, schedule="interleaved"),
    Layout("TP2 + SP x EP2, distributed optimizer", SP | EP, distributed=True),
    Layout("PP2 x VPP2 x EP2, recompute", VPP | DP | EP, recompute=True),
)
MODELS = {MIXTURE: LAYOUTS, HYBRID_MIXTURE: HYBRID_LAYOUTS}
LOSS_LIMIT, GRADIENT_LIMIT = 3e-6, 1e-5


def routed_batch(folder: Path) -> Batch:
    """Return a batch with random experts; a fed token's row lies with the next token, and some have none."""
    (stream,) = ModelFacts.of(folder).streams
    batch, generator = random_batch(), torch.Generator().manual_seed(3)
    num_tokens, num_layers, num_chosen = batch.token_ids_T.numel(), *stream.shape
    scores_TLC = torch.rand(num_tokens, num_layers, 8, generator=generator)
    rows_TLK = scores_TLC.topk(num_chosen).indices.to(torch.uint8)
    rows_TLK[torch.rand(num_tokens, generator=generator) < 0.1] = 255
    return batch.having(stream, rows_TLK)


def of_stage(batch: Batch, learner: MegatronLearner) -> Batch:
    """Return the batch as `BatchShares` deals it to a stage."""
    ((stream, rows_TLK),) = batch.extra.items()
    layers = learner.layout.layers_of_stage(learner.layout.pipeline_rank, stream.shape[0])
    return batch.having(stream, rows_TLK[:, layers])


def config_of(layout: Layout, *, replays: bool = True) -> Config:
    config = layout.config()
    return config.model_copy(update={"model": config.model.model_copy(update={"replay_routes": replays})})


def measure(rank: int, world_size: int, root: Path, model: str) -> None:
    """Save scores, loss and gradients of every layout with `world_size` processes."""
    for number, layout in enumerate(MODELS[model]):
        if layout.num_processes == world_size:
            for replays in (True, False) if number == 0 else (True,):
                result = update(config_of(layout, replays=replays), root / model)
                if rank == 0:
                    torch.save(result, root / f"{model}-{number}-{replays}.pt")


def update(config: Config, folder: Path) -> dict[str, Any]:
    learner = MegatronLearner(resolve(config, folder))
    minibatch = one_minibatch(
        of_stage(routed_batch(folder), learner),
        max_tokens=config.train.max_tokens_per_microbatch,
        share=learner.share,
    )
    before, scored = learner.log_probs(minibatch), [log_probs_R for log_probs_R, _ in learner.score(minibatch)]
    result = learner.step(minibatch, BOUNDS)
    for first, second, third in zip(before, scored, result.log_probs, strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=0)
        torch.testing.assert_close(first, third, atol=1e-6, rtol=0)
    gradients = {name: gradient.clone() for name, gradient in learner.named_gradients()}
    parallel_state.destroy_model_parallel()
    return {"metrics": result.metrics, "gradients": gradients}


class Forced:
    """Recorded experts in the place of a router's choice in transformers, sequence by sequence."""

    def __init__(self, gate: Module, rows_TK: Tensor, lens: list[int]) -> None:
        self.gate, self.at = gate, 0
        self.told = [torch.cat([rows[1:], rows.new_full((1, rows.shape[1]), 255)]) for rows in rows_TK.split(lens)]
        self.num_other = self.num_told = 0
        gate.register_forward_hook(self.chosen)

    def chosen(self, gate: Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits_TC, _, own_TK = output
        told_TK = self.told[self.at].long()
        self.at += 1
        is_told_T = told_TK[:, 0] != 255
        chosen_TK = torch.where(is_told_T[:, None], told_TK, own_TK)
        is_other_T = (chosen_TK.sort(1).values != own_TK.sort(1).values).any(1)
        self.num_other, self.num_told = self.num_other + int(is_other_T.sum()), self.num_told + int(is_told_T.sum())
        return logits_TC, logits_TC.gather(1, chosen_TK).softmax(-1), chosen_TK


def expected_update(folder: Path) -> tuple[Reference, float]:
    """Return what transformers computes with the routes, and the share of rows that its routers would change."""
    batch, model = routed_batch(folder), load_float64(folder)
    (rows_TLK,) = batch.extra.values()
    lens = batch.seq_lens_S.tolist()
    forced = [Forced(layer.mlp.gate, rows_TLK[:, i], lens) for i, layer in enumerate(model.model.layers)]
    reference = reference_update(model, batch)
    return reference, sum(f.num_other for f in forced) / sum(f.num_told for f in forced)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replay")
    for model in MODELS:
        save_random_model(model, root / model)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_updates_with_routes_equal_transformers_with_the_same_routes(model: str, folder: Path) -> None:
    wanted, other_share = expected_update(folder / model)
    for world_size in sorted({layout.num_processes for layout in MODELS[model]}):
        run_distributed(measure, world_size, folder, model)

    def differences(number: int, *, replays: bool = True) -> tuple[float, float]:
        got = torch.load(folder / f"{model}-{number}-{replays}.pt", weights_only=True)
        scale = min(1.0, 0.05 / wanted.grad_norm)
        assert got["gradients"].keys() == wanted.gradients.keys()
        if replays:
            assert got["metrics"]["routes/other_share"] == pytest.approx(other_share)
        return abs(got["metrics"]["loss/policy"] / wanted.loss - 1), max(
            float((got["gradients"][name] - g * scale).norm() / (g * scale).norm())
            for name, g in wanted.gradients.items()
        )

    assert other_share > 0.5
    found = {layout.title: differences(number) for number, layout in enumerate(MODELS[model])}
    print(other_share, found, differences(0, replays=False))
    assert all(loss <= LOSS_LIMIT and gradient <= GRADIENT_LIMIT for loss, gradient in found.values())
    assert min(differences(0, replays=False)) > 1e-2, "without replay"


def sampled_in_bfloat16(folder: Path) -> Batch:
    """Return log-probs and experts of a sampler in other arithmetic, with the same weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    model.set_experts_implementation("eager")  # the other one wants larger matrices
    batch, chosen = random_batch(), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *seen: chosen.append(seen[-1][-1]))
    log_probs, rows = [], []
    for ids in batch.token_ids_T.split(batch.seq_lens_S.tolist()):
        chosen.clear()
        with torch.no_grad():
            all_log_probs = (model(ids[None]).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        log_probs += [torch.zeros(1), all_log_probs.gather(1, ids[1:, None])[:, 0]]
        rows_TLK = torch.stack(chosen, 1).to(torch.uint8)
        rows += [torch.full_like(rows_TLK[:1], 255), rows_TLK[:-1]]
    (stream,) = ModelFacts.of(folder).streams
    batch = batch.having(stream, torch.cat(rows))
    return replace(batch, behaviour_logprobs_T=torch.cat(log_probs) * batch.sampled_T)


def check_mismatch(rank: int, world_size: int, folder: Path, results: Path) -> None:
    """Save the mean difference from the sampler's log-probs, with its experts and with the routers' own."""
    learner = MegatronLearner(resolve(config_of(Layout("one process")), folder))
    minibatch = one_minibatch(sampled_in_bfloat16(folder), max_tokens=40, share=learner.share)
    sampled_R = torch.cat([batch.behaviour_logprobs_R for batch in minibatch.micro_batches])
    means = [
        float((torch.cat(learner.log_probs(m)) - sampled_R).abs().mean()) for m in (minibatch, unrouted(minibatch))
    ]
    torch.save((*means, learner.step(minibatch, BOUNDS).metrics["routes/other_share"]), results)


@pytest.mark.slow
def test_replay_lowers_the_mismatch_with_a_sampler_in_bfloat16(folder: Path) -> None:
    run_distributed(check_mismatch, 1, folder / MIXTURE, folder / "mismatch.pt")
    with_replay, without, other_share = torch.load(folder / "mismatch.pt", weights_only=True)
    print(f"mismatch {without:.5f} -> {with_replay:.5f} nats, other experts in {other_share:.4f} of the rows")
    assert 0 < other_share < 0.5
    assert with_replay < 0.8 * without


def unrouted(minibatch: MiniBatch) -> MiniBatch:
    """Return the mini-batch without recorded experts."""
    packs = [
        replace(pack, extra={stream: torch.full_like(rows, 255) for stream, rows in pack.extra.items()})
        for pack in minibatch.micro_batches
    ]
    return replace(minibatch, micro_batches=tuple(packs))


def check_counts_and_reference(rank: int, world_size: int, folder: Path) -> None:
    """The reference policy has the same weights; then one layer on one of two ranks does not take its routes."""
    config = config_of(Layout("EP2", DP | EP))
    loss = config.loss.model_copy(update={"kl_coef": 0.1})
    learner = MegatronLearner(resolve(config.model_copy(update={"loss": loss}), folder))
    minibatch = one_minibatch(routed_batch(folder), max_tokens=40, share=learner.share)
    assert learner.reference is not None
    plain = torch.cat(learner.reference.log_probs(minibatch))
    torch.testing.assert_close(torch.cat(learner.log_probs(unrouted(minibatch))), plain, rtol=0, atol=0)
    assert (torch.cat(learner.log_probs(minibatch)) - plain).abs().mean() > 0.1
    (policy,) = learner.model
    if rank == 1:
        policy.decoder.layers[2].mlp.router.router_replay = None
    with pytest.raises(UserError, match=r"replay of routes, layer 2: .*\[\d+, \d+, \d+, 0, 0, 0\] for \d+ tokens"):
        learner.step(minibatch, BOUNDS)
    parallel_state.destroy_model_parallel()


@pytest.mark.slow
def test_the_reference_never_replays_and_a_wrong_count_ends_all_ranks(folder: Path) -> None:
    run_distributed(check_counts_and_reference, 2, folder / MIXTURE)


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_a_router_scores_the_recorded_experts(pre_softmax: bool) -> None:
    """With and without `norm_topk_prob`; the second row has no record, the third is padding."""
    logits_TC = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    stream = TokenStream("routes", "uint8", (1, 2), missing=255, on="fed", to="owner's stage")
    own_TK = logits_TC.topk(2).indices
    recorded_TK = torch.tensor([[5, 0], [255, 255], [255, 255]], dtype=torch.uint8)
    assert {5, 0} != {*own_TK[0].tolist()}
    counts_LX = torch.zeros(1, 2 * 3 + 1 + 6, dtype=torch.int64)
    pack = PackRoutes(recorded_TK[:, None], torch.tensor([True, True, False]), stream, counts_LX)
    router = LayerRoutes(0, 0)
    for _ in range(2):  # the second time as in recomputation
        router.receive(Module(), (), {"packed_seq_params": PackedSequences(routes=pack)})
        probs_TC, map_TC = topk_routing_with_score_function(
            logits_TC, 2, use_pre_softmax=pre_softmax, router_replay=router
        )
    chosen_TK = torch.cat([torch.tensor([[5, 0]]), own_TK[1:]])
    expected_TK = logits_TC.softmax(-1).gather(1, chosen_TK)
    if not pre_softmax:
        expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(probs_TC.gather(1, chosen_TK), expected_TK)
    assert torch.equal(map_TC.nonzero()[:, 1].view(3, 2), chosen_TK.sort(1).values)
    loads = torch.zeros(6).scatter_add_(0, chosen_TK[:2].flatten(), torch.ones(4)).tolist()
    assert counts_LX[0].tolist() == [1, 1, 1, 1, 1, 1, 1, *loads]
    probs_TC[0, 5].backward()
    assert logits_TC.grad is not None
    assert logits_TC.grad[0, 0] < 0 < logits_TC.grad[0, 5]
    with pytest.raises(AssertionError, match="without its layer"):
        topk_routing_with_score_function(logits_TC, 2, router_replay=router)
