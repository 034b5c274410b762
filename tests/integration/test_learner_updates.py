"""What steers an update besides the loss: KL to a reference, weight decay, skipped updates, the learning rate."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from bapo_megatron.checkpoint.folder import MOMENTS
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, ConfigError, DivergedError
from bapo_megatron.learner.exchange import gather_weights
from bapo_megatron.learner.gradient_guard import MAX_SKIPPED_IN_A_ROW
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import scorers_of, with_scores
from bapo_megatron.resolved import resolve
from bapo_megatron.types import MiniBatch
from tests.distributed import run_distributed
from tests.integration.learner_reference import (
    ADAM_EPS,
    BOUNDS,
    LR,
    MIXTURE,
    literal_kl,
    load_float64,
    random_batch,
    reference_update,
    save_random_model,
)
from tests.integration.test_learner import assert_close, make_config, make_minibatch

TOLERANCE = 1e-5
START, TARGET = 0.7, 0.02  # start and target of the adaptive coefficient: the KL is far over the target, so it grows
FAMILY = "llama_biases"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a policy, a reference with the same vocabulary, and the float64 updates for each estimator."""
    root = tmp_path_factory.mktemp("updates")
    save_random_model(FAMILY, root / "policy")
    save_random_model(MIXTURE, root / "mixture")
    other = load_float64(root / "policy")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    other.float().save_pretrained(root / "reference")
    (root / "reference" / "tokenizer.json").write_text("{}")  # a reference is a complete model folder
    reference_T = reference_update(load_float64(root / "reference"), random_batch()).log_probs_T
    torch.save(reference_T, root / "reference.pt")
    for estimator in ("k1", "k2", "k3"):
        torch.save(adaptive_updates(root / "policy", reference_T, estimator), root / f"{estimator}.pt")
    return root


def adaptive_updates(path: Path, reference_T: Tensor, estimator: str) -> list[dict[str, Any]]:
    model, coefficient, updates = load_float64(path), START, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.0)
    for _ in range(2):
        want = reference_update(model, random_batch(), optimizer, kl=(reference_T, estimator, coefficient))
        kl = float(literal_kl(want.log_probs_T, reference_T, estimator)[random_batch().mask_T].mean())
        updates.append({"gradients": want.gradients, "loss": want.loss, "kl": kl, "coefficient": coefficient})
        coefficient *= 1 + max(-0.2, min(0.2, kl / TARGET - 1)) / 10
    return updates


def kl_config(layout: dict[str, Any], **loss: Any) -> Config:
    config = make_config(layout, max_tokens_per_microbatch=60)
    return config.model_copy(update={"loss": config.loss.model_copy(update=loss)})


def check_kl(root: Path, layout: dict[str, Any], estimator: str) -> None:
    """Check reference scores, KL, coefficient and gradient; between updates, the state goes through JSON."""
    path = str(root / "reference")
    config = kl_config(layout, kl_coef=START, kl_target=TARGET, kl_estimator=estimator, reference_path=path)
    learner = MegatronLearner(resolve(config, root / "policy"))
    batch = with_scores(random_batch(), scorers_of(config, learner, learner.reference), learner, config)
    wanted_T = torch.load(root / "reference.pt", weights_only=True)
    is_response_T = batch.behaviour_logprobs_T != 0
    assert batch.reference_logprobs_T is not None
    assert_close(batch.reference_logprobs_T[is_response_T], wanted_T[is_response_T], "log-probs of the reference")
    minibatch = make_minibatch(learner, 60, batch)
    for number, want in enumerate(torch.load(root / f"{estimator}.pt", weights_only=True)):
        metrics = learner.step(minibatch, BOUNDS).metrics
        assert metrics["loss/policy"] == pytest.approx(want["loss"], rel=TOLERANCE, abs=TOLERANCE)
        assert metrics["loss/kl_reference"] == pytest.approx(want["kl"], rel=TOLERANCE, abs=TOLERANCE)
        assert metrics["loss/kl_coef"] == pytest.approx(want["coefficient"], rel=TOLERANCE)
        for name, gradient in learner.named_gradients():
            if learner.layout.rank == 0:
                assert_close(gradient, want["gradients"][name], f"update {number}, gradient of {name}", 2e-5)
        state = json.loads(json.dumps(learner.state_dict()))
        learner.kl_coefficient.value = math.nan
        learner.load_state_dict(state)
    parallel_state.destroy_model_parallel()


def check_policy_as_reference(policy: Path, layout: dict[str, Any]) -> None:
    """If the policy is its own reference, KL and its gradient are exactly 0, so the update is the plain one."""
    gradients = []
    for loss in ({}, {"kl_coef": 100.0, "kl_estimator": "k2"}, {"kl_coef": 100.0}):
        config = kl_config(layout, **loss)
        learner = MegatronLearner(resolve(config, policy))
        batch = with_scores(random_batch(), scorers_of(config, learner, learner.reference), learner, config)
        metrics = learner.step(make_minibatch(learner, 60, batch), BOUNDS).metrics
        assert metrics.get("loss/kl_reference") == (0.0 if loss else None)
        gradients.append({name: g.clone() for name, g in learner.named_gradients()})
        parallel_state.destroy_model_parallel()
    for gradient in gradients[1:]:
        assert all(torch.equal(gradient[name], plain) for name, plain in gradients[0].items())


def check_refusals(root: Path) -> None:
    save_random_model("qwen2", root / "other")
    config_json = json.loads((root / "other" / "config.json").read_text())
    (root / "other" / "config.json").write_text(json.dumps(config_json | {"vocab_size": 40}))
    (root / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="has a vocabulary of 40 tokens, but the policy's has 33"):
        MegatronLearner(resolve(kl_config({}, kl_coef=0.1, reference_path=str(root / "other")), root / "policy"))
    parallel_state.destroy_model_parallel()
    with pytest.raises(CheckpointError, match=r"loss.reference_path = .* there is no folder"):
        MegatronLearner(resolve(kl_config({}, kl_coef=0.1, reference_path=str(root / "none")), root / "policy"))
    parallel_state.destroy_model_parallel()


def check_one_process(rank: int, world_size: int, root: Path) -> None:
    for estimator in ("k1", "k3"):
        check_kl(root, {}, estimator)
    check_policy_as_reference(root / "policy", {})
    check_refusals(root)


def test_one_process(folder: Path) -> None:
    run_distributed(check_one_process, 1, folder)


def whole_state(learner: MegatronLearner) -> dict[str, Tensor]:
    """Return weights and both moments, on rank 0."""
    state = {f"weight of {name}": tensor.clone() for name, tensor in learner.weights().whole()}
    for moment in MOMENTS:
        gather = partial(learner.adam.gather, name=moment)
        named = gather_weights(learner.model, learner.shape, learner.layout, gather)
        state |= {f"{moment} of {name}": tensor.clone() for name, tensor in named}
    return state


def check_skips(learner: MegatronLearner, minibatch: MiniBatch) -> None:
    """A nan on one rank leaves weights and moments of all ranks untouched; too many in a row end the run."""
    learner.step(minibatch, BOUNDS)
    before = whole_state(learner)
    broken = minibatch
    if learner.layout.data_rank == learner.layout.data_size - 1:
        micro = minibatch.micro_batches[0]
        micro = dataclasses.replace(micro, advantages_R=torch.where(micro.mask_R, torch.nan, micro.advantages_R))
        broken = dataclasses.replace(minibatch, micro_batches=(micro, *minibatch.micro_batches[1:]))
    metrics = learner.step(broken, BOUNDS).metrics
    assert metrics["optimizer/skipped"] == 1.0
    assert not math.isfinite(metrics["optimizer/grad_norm"])
    after = whole_state(learner)
    assert learner.layout.rank > 0 or any(after[name].any() for name in after if name.startswith(MOMENTS[1]))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for _ in range(MAX_SKIPPED_IN_A_ROW - 2):
        learner.step(broken, BOUNDS)
    with pytest.raises(DivergedError, match=f"the last {MAX_SKIPPED_IN_A_ROW} updates were skipped"):
        learner.step(broken, BOUNDS)


def check_weight_decay(root: Path, layout: dict[str, Any]) -> None:
    """Decay changes one update by lr x decay x weight on matrices, and not at all on norms and biases."""
    decay, before, results = 0.5, load_float64(root / "policy").state_dict(), []
    for weight_decay in (0.0, decay):
        config = make_config(layout, max_tokens_per_microbatch=60)
        optimizer = config.optimizer.model_copy(update={"weight_decay": weight_decay})
        learner = MegatronLearner(resolve(config.model_copy(update={"optimizer": optimizer}), root / "policy"))
        minibatch = make_minibatch(learner, 60, random_batch())
        learner.step(minibatch, BOUNDS)
        results.append({name: tensor.clone() for name, tensor in learner.weights().whole()})
        if weight_decay:
            check_skips(learner, minibatch)
        parallel_state.destroy_model_parallel()
    kinds = set()
    for name, plain in results[0].items() if learner.layout.rank == 0 else ():
        is_left_alone = name.endswith(".bias") or "norm" in name
        kinds.add(is_left_alone)
        expected = plain if is_left_alone else plain - LR * decay * before[name].float()
        torch.testing.assert_close(results[1][name], expected, rtol=0, atol=0 if is_left_alone else 1e-7, msg=name)
    assert learner.layout.rank > 0 or kinds == {True, False}


def check_two_processes(rank: int, world_size: int, root: Path) -> None:
    check_policy_as_reference(root / "mixture", {"data": 2, "expert": 2, "distributed": True})
    check_kl(root, {"tensor": 2, "sequence": True}, "k3")
    check_kl(root, {"pipeline": 2}, "k2")
    check_kl(root, {"context": 2}, "k3")
    check_kl(root, {"data": 2, "distributed": True}, "k3")
    check_weight_decay(root, {"tensor": 2})
    check_weight_decay(root, {"data": 2, "distributed": True})


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    run_distributed(check_two_processes, 2, folder)
