"""A teacher in the learner: its scores, and the advantages that follow, on real models in every layout."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bapo_megatron.buffer.packing import sequences_of
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import policy_passes, scorers_of, with_scores
from bapo_megatron.resolved import resolve
from bapo_megatron.tokens import TEACHER_LOGPROBS
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    VOCAB_SIZE,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)
from tests.integration.test_learner import assert_close, make_config
from tests.integration.test_small_batches import dealt

FAMILY = "qwen2"
NUM_PADDING = 6  # rows of the teacher's vocabulary beyond the policy's
TEACHERS = ("teacher", "reference", "policy")
"""Of three sources: one with rows of padding, and two that have other parts, too."""
COEF = 0.7


def save_tokenizer(folder: Path, words: Sequence[str]) -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def save_other(root: Path, name: str, seed: int, num_rows: int) -> None:
    """Save a model with other weights than the policy's, and more or fewer rows of the vocabulary."""
    model = load_float64(root / "policy")
    torch.manual_seed(seed)
    model.resize_token_embeddings(VOCAB_SIZE + num_rows, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    model.float().save_pretrained(root / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a policy, a reference, and teachers: with rows of padding, with too few rows, with another tokenizer."""
    root = tmp_path_factory.mktemp("teacher")
    save_random_model(FAMILY, root / "policy")
    words = [f"w{i}" for i in range(VOCAB_SIZE - 1)]
    for number, (name, num_rows) in enumerate(
        {"reference": 0, "teacher": NUM_PADDING, "small": -3, "other": NUM_PADDING}.items()
    ):
        save_other(root, name, number, num_rows)
        save_tokenizer(root / name, [*words[:-1], "another"] if name == "other" else words)
    save_tokenizer(root / "policy", words)
    scores = {name: reference_update(load_float64(root / name), random_batch()) for name in ("policy", "reference")}
    teacher = load_float64(root / "teacher")
    teacher.resize_token_embeddings(VOCAB_SIZE)  # without the rows of padding: the softmax is over the policy's
    scores["teacher"] = reference_update(teacher, random_batch())
    torch.save({name: one.log_probs_T for name, one in scores.items()}, root / "scores.pt")
    return root


def config_of(root: Path, layout: dict[str, Any], *teachers: str) -> Config:
    config = make_config(layout, max_tokens_per_microbatch=60)
    loss = config.loss.model_copy(update={"kl_coef": 0.1, "reference_path": str(root / "reference")})
    paths = [str(root / teacher) for teacher in teachers]
    named = {"path": paths[0]} if len(paths) == 1 else {"path_by_source": dict(zip("abc", paths, strict=False))}
    section = config.teacher.model_copy(update={"coef": COEF, **named})
    return config.model_copy(update={"loss": loss, "teacher": section})


def check_layout(root: Path, layout: dict[str, Any], *teachers: str) -> None:
    """Check the scores of three models, and the advantages, against transformers in float64; each sequence has one of
    the teachers."""
    config = config_of(root, layout, *teachers)
    learner = MegatronLearner(resolve(config, root / "policy"))
    scorers = scorers_of(config, learner, learner.reference, learner.teachers)
    whole = random_batch()
    teacher_S = torch.arange(whole.num_sequences) % len(teachers)
    if len(teachers) > 1:
        whole = replace(whole, teacher_S=teacher_S)
    needed = sequences_of(policy_passes(config, 0, learner, scorers), whole, learner.layout.data_size)
    batch = with_scores(dealt(whole, needed, learner.layout.data_rank), scorers, learner, config)
    wanted: dict[str, Tensor] = torch.load(root / "scores.pt", weights_only=True)
    means = [round(float(scores_T[whole.sampled_T].mean()), 3) for scores_T in wanted.values()]
    assert len({*means}) == 3, f"policy, reference and teacher are three models: {means}"
    of_each = torch.stack([wanted[name] for name in teachers])
    wanted["teacher"] = of_each.gather(0, teacher_S.repeat_interleave(whole.seq_lens_S)[None])[0]
    is_here = batch.here(whole.sampled_T)
    assert batch.reference_logprobs_T is not None
    found = {"reference": batch.reference_logprobs_T, "teacher": batch.extra[TEACHER_LOGPROBS]}
    for name, scores_T in found.items():
        assert_close(scores_T[is_here], batch.here(wanted[name])[is_here], f"log-probs of the {name}, {layout}")
    gap_T = torch.where(whole.sampled_T, COEF * (wanted["teacher"] - whole.behaviour_logprobs_T), 0.0)
    assert_close(batch.advantages_T, batch.here(whole.advantages_T + gap_T), f"advantages, {layout}")
    trained = gap_T[whole.mask_T]
    assert batch.metrics["teacher/kl"] == pytest.approx(-float(trained.mean()) / COEF, abs=1e-5)
    assert batch.metrics["teacher/advantage_std"] == pytest.approx(float(trained.std(correction=0)), abs=1e-5)
    parallel_state.destroy_model_parallel()


def check_refusals(root: Path) -> None:
    cases = {
        "small": f"teacher.path='.*' has a vocabulary of {VOCAB_SIZE - 3} tokens, but the policy's has {VOCAB_SIZE}",
        "other": "teacher.path='.*': its tokenizer is another one: token 31 is 'another' there, and 'w31' in the "
        "policy's",
    }
    for teacher, problem in cases.items():
        for teachers in ((teacher,), ("teacher", teacher)):
            named = problem if len(teachers) == 1 else problem.replace("path", "path_by_source.b")
            with pytest.raises(ConfigError, match=named):
                MegatronLearner(resolve(config_of(root, {}, *teachers), root / "policy"))
            parallel_state.destroy_model_parallel()


def check_one_process(rank: int, world_size: int, root: Path) -> None:
    check_layout(root, {}, "teacher")
    check_layout(root, {}, *TEACHERS)
    check_refusals(root)


def check_two_processes(rank: int, world_size: int, root: Path) -> None:
    for layout in (
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"pipeline": 2},
        {"data": 2, "distributed": True},
        {"context": 2},
    ):
        check_layout(root, layout, "teacher")
        check_layout(root, layout, *TEACHERS)


def test_one_process(folder: Path) -> None:
    run_distributed(check_one_process, 1, folder)


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    run_distributed(check_two_processes, 2, folder)
