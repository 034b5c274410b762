"""The divergence from a teacher in the learner's loss, on real models, at any layout and split."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.losses import LOSS_SECTIONS
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import scorers_of, with_likeliest
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    HYBRID,
    TEMPERATURE,
    VOCAB_SIZE,
    forest_batch,
    load_float64,
    save_random_model,
)
from tests.integration.test_mean_over_learner import config_of, mean_of
from tests.integration.test_rivals_learner import ONE_PROCESS, TOLERANCE, TWO_PROCESSES, Case, batch_of_outcomes
from tests.integration.test_schedule import SMALL
from tests.integration.test_teacher_learner import FAMILY, NUM_PADDING, save_other, save_tokenizer

COEF = 0.7
# mean_over, divergence, top_k
TERMS = [("tokens", "forward", 5), ("responses", "reverse", 1), ("budget", "reverse", 16)]
TEACHERS = ("teacher", "other", "policy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a policy with tied embeddings, and two teachers with rows of padding."""
    root = tmp_path_factory.mktemp("likely")
    save_random_model(FAMILY, root / "policy")
    for seed, name in enumerate(TEACHERS[:2], start=1):
        save_other(root, name, seed, NUM_PADDING)
    for name in TEACHERS:
        save_tokenizer(root / name, [f"w{i}" for i in range(VOCAB_SIZE - 1)])
    return root


def log_softmax_TV(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the log-probs of each token's alternatives: zeros for the first of a sequence."""
    rows = []
    for ids in batch.token_ids_T.split(batch.seq_lens_S.tolist()):
        found_TV = (model(ids[None]).logits[0, :-1, :VOCAB_SIZE] / TEMPERATURE).log_softmax(-1)
        rows.append(torch.cat([torch.zeros(1, VOCAB_SIZE, dtype=torch.float64), found_TV]))
    return torch.cat(rows)


def check_layout(
    root: Path,
    layout: dict[str, Any],
    max_tokens: int,
    term: tuple[str, str, int],
    loss: str = "grpo",
    teachers: Sequence[str] = TEACHERS[:1],
    **train: Any,
) -> None:
    """Check metrics and gradient against transformers in float64; a loss other than grpo has advantages of 0."""
    mean_over, kind, top_k = term
    config: Config = config_of(
        LOSS_SECTIONS[loss].model_validate({"name": loss, "mean_over": mean_over}), layout, max_tokens, **train
    )
    paths = [str(root / name) for name in teachers]
    named = {"path": paths[0]} if len(paths) == 1 else {"path_by_source": dict(zip("abc", paths, strict=True))}
    teacher = config.teacher.model_copy(update={"coef": COEF, "top_k": top_k, "divergence": kind, **named})
    config = config.model_copy(update={"teacher": teacher})
    batch = batch_of_outcomes()
    teacher_S = torch.arange(batch.num_sequences) % len(teachers)
    if len(teachers) > 1:
        batch = dataclasses.replace(batch, teacher_S=teacher_S)
    if loss != "grpo":
        batch = dataclasses.replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))

    model = load_float64(root / "policy")
    log_p_TV = log_softmax_TV(model, batch)
    with torch.no_grad():
        of_each = torch.stack([log_softmax_TV(load_float64(root / name), batch) for name in teachers])
        log_q_TV = of_each[teacher_S.repeat_interleave(batch.seq_lens_S), torch.arange(len(batch.mask_T))]
    ids_TK = log_q_TV.argsort(dim=1, descending=True)[:, :top_k]
    is_other_TV = torch.ones_like(log_q_TV).scatter_(1, ids_TK, 0.0)
    p_TX, q_TX = (
        torch.cat([x.exp().gather(1, ids_TK), (x.exp() * is_other_TV).sum(1, keepdim=True)], 1)
        for x in (log_p_TV, log_q_TV)
    )
    terms_TX = q_TX * (q_TX / p_TX).log() if kind == "forward" else p_TX * (p_TX / q_TX).log()
    divergence_T = terms_TX.sum(1)
    own_T, teachers_T = (x_TV.gather(1, batch.token_ids_T[:, None])[:, 0] for x_TV in (log_p_TV, log_q_TV))
    ratio_T = torch.where(batch.mask_T, own_T - batch.behaviour_logprobs_T.double(), 0.0).exp()
    advantages_T = batch.advantages_T.double()
    policy_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    mean_of(mean_over)(policy_T + COEF * divergence_T, batch).backward()
    gaps_T = batch.behaviour_logprobs_T.double() - teachers_T

    learner = MegatronLearner(resolve(config, root / "policy"))
    assert scorers_of(config, learner, None, learner.teachers) == [], "no rank gets a stream of a teacher's"
    packed = one_minibatch(batch, max_tokens=max_tokens, share=learner.share)
    minibatch = with_likeliest(packed, batch, learner.teachers, config.teacher.top_k)
    for one in minibatch.micro_batches:
        if learner.layout.is_last_stage:
            assert one.likely_ids_RK is not None
            assert one.likely_ids_RK.shape == (one.rows_R.numel(), top_k)
        else:
            assert one.likely_ids_RK is None
    metrics = learner.step(minibatch, BoundsFinder(config, learner).find(minibatch)).metrics
    means = {
        "teacher/divergence": divergence_T,
        "teacher/other_choice_share": (p_TX[:, :-1].argmax(1) > 0).double(),
        "teacher/top_k_mass": q_TX[:, :-1].sum(1),
        "teacher/kl": gaps_T,
        "loss/policy": policy_T,
    }
    for name, values_T in means.items():
        wanted = float(values_T.detach()[batch.mask_T].mean())
        assert metrics[name] == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE), name
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in learner.named_gradients():
        if learner.layout.rank == 0:
            torch.testing.assert_close(gradient.double(), gradients[name], rtol=TOLERANCE, atol=TOLERANCE)
    parallel_state.destroy_model_parallel()


def check_one(rank: int, world_size: int, root: Path) -> None:
    check_layout(root, {}, SMALL, TERMS[0])


def check_layouts(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for layout, max_tokens in cases:
        for term in TERMS:
            check_layout(root, layout, max_tokens, term)
        check_layout(root, layout, max_tokens, TERMS[0], teachers=TEACHERS)
    if world_size == 1:
        for schedule in ("forwards_first", "interleaved"):
            check_layout(root, {}, SMALL, TERMS[1], "bapo", schedule=schedule)


def test_a_term_of_the_loss(folder: Path) -> None:
    run_distributed(check_one, 1, folder)


def check_unlike_packs(rank: int, world_size: int, root: Path) -> None:
    """A policy shares prompts, which linear attention cannot: such a teacher reads whole sequences."""
    batch, found = forest_batch(), []
    for shares in (False, True):
        train = {"share_prompts": shares, "max_tokens_per_microbatch": 200}
        config = Config.model_validate({"teacher": {"path": str(root / "hybrid"), "top_k": 4}, "train": train})
        learner = MegatronLearner(resolve(config, root / "policy"))
        minibatch = one_minibatch(batch, max_tokens=200, share=learner.share)
        assert any(one.follows_S is not None for one in minibatch.micro_batches) == shares
        rows_TX = torch.zeros(len(batch.mask_T), 5)
        for one in with_likeliest(minibatch, batch, learner.teachers, 4).micro_batches:
            assert one.likely_logprobs_RX is not None
            rows_TX[one.batch_rows_R] = one.likely_logprobs_RX
        found.append(rows_TX)
        parallel_state.destroy_model_parallel()
    torch.testing.assert_close(*found, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_a_teacher_reads_packs_of_its_own(folder: Path) -> None:
    save_random_model(HYBRID, folder / "hybrid")
    save_tokenizer(folder / "hybrid", [f"w{i}" for i in range(VOCAB_SIZE - 1)])
    run_distributed(check_unlike_packs, 1, folder)


@pytest.mark.slow
def test_one_process(folder: Path) -> None:
    run_distributed(check_layouts, 1, folder, ONE_PROCESS)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    cases = [*TWO_PROCESSES, ({"data": 2, "distributed": True}, SMALL)]
    run_distributed(check_layouts, 2, folder, cases)
