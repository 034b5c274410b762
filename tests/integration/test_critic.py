"""The critic against a single-process float64 reference, for every kind of layout and batch split; its checkpoints."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.errors import CheckpointError, ConfigError, DivergedError
from bapo_megatron.learner.critic import Critic
from bapo_megatron.learner.gradient_guard import MAX_SKIPPED_IN_A_ROW
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.values import ValueAdvantages
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from tests.distributed import HANG_S, run_distributed
from tests.integration.learner_reference import ADAM_EPS, load_float64, random_batch, save_random_model

NUM_UPDATES = 3
TOLERANCE = 1e-5
LR, CLIP, GAMMA, LAM = 3e-3, 0.05, 0.99, 0.9

Case = tuple[str, dict[str, Any], int]  # model, layout, tokens per micro-batch


def prompt_lens(batch: Batch) -> Tensor:
    return batch.seq_lens_S - batch.num_sampled_S


def make_batch() -> Batch:
    batch = random_batch()
    rewards_S = torch.randn(batch.num_sequences, generator=torch.Generator().manual_seed(3))
    return replace(batch, advantages_T=torch.zeros_like(batch.advantages_T), rewards_S=rewards_S)


def save_critic(source: Path, target: Path, num_outputs: int = 1) -> None:
    """Save the language model's body with a random value head."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    weights.pop("lm_head.weight", None)
    noise = torch.randn(num_outputs, weights["model.norm.weight"].numel(), generator=torch.Generator().manual_seed(9))
    save_file(weights | {"score.weight": 0.15 * noise}, target / "model.safetensors", metadata={"format": "pt"})
    (target / "tokenizer.json").write_text("{}")


@dataclass
class Reference:
    """The expected results of one step of the critic; per-token values are indexed like the batch's tokens."""

    advantages_T: Tensor  # not whitened
    losses: list[float]
    clip_shares: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]  # gradients of the last update
    weights: dict[str, Tensor]  # weights after the last update


def reference_step(folder: Path, batch: Batch) -> Reference:
    """Use plain transformers, one sequence at a time; GAE by recursion; literal clipped value loss; torch's Adam."""
    model = load_float64(folder.with_name(folder.name.removeprefix("critic-")))
    head = torch.nn.Parameter(load_file(folder / "model.safetensors")["score.weight"].double())
    body = {f"model.{name}": p for name, p in model.model.named_parameters()}
    parameters = body | {"score.weight": head}
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=(0.9, 0.95), eps=ADAM_EPS, weight_decay=0.0)

    def values() -> Tensor:
        """Return V at each token, computed from the tokens before it; 0 on prompts."""
        values_T = []
        for ids, prompt_len in zip(batch.token_ids_T.split(batch.seq_lens_S.tolist()), prompt_lens(batch), strict=True):
            of_states = (model.model(ids[None]).last_hidden_state[0] @ head[0])[prompt_len - 1 : -1]
            values_T.append(torch.cat([torch.zeros(int(prompt_len), dtype=torch.float64), of_states]))
        return torch.cat(values_T)

    with torch.no_grad():
        old_T = values()
    advantages_T = torch.zeros_like(old_T)
    ends = batch.seq_lens_S.cumsum(0).tolist()
    for end, length, prompt_len, reward in zip(
        ends, batch.seq_lens_S.tolist(), prompt_lens(batch).tolist(), batch.rewards_S.tolist(), strict=True
    ):
        following, advantage = 0.0, 0.0
        for t in range(end - 1, end - length + prompt_len - 1, -1):
            error = (reward if t == end - 1 else 0.0) + GAMMA * following - float(old_T[t])
            advantage = error + GAMMA * LAM * advantage
            advantages_T[t], following = advantage, float(old_T[t])
    returns_T = advantages_T + old_T

    found = Reference(advantages_T, [], [], [], {}, {})
    mask_T = batch.mask_T
    for _ in range(NUM_UPDATES):
        values_T = values()
        near_T = values_T.clamp(old_T - CLIP, old_T + CLIP)
        plain, clipped = 0.5 * (values_T - returns_T) ** 2, 0.5 * (near_T - returns_T) ** 2
        loss = torch.maximum(plain, clipped)[mask_T].mean()
        optimizer.zero_grad()
        loss.backward()
        found.losses.append(loss.item())
        found.clip_shares.append((clipped > plain)[mask_T].double().mean().item())
        found.gradients = {name: p.grad.clone() for name, p in parameters.items()}
        found.grad_norms.append(float(torch.stack([g.norm() for g in found.gradients.values()]).norm()))
        optimizer.step()
    found.weights = {name: p.detach() for name, p in parameters.items()}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("critic")
    for family in ("qwen3", "qwen2", "llama_biases"):
        save_random_model(family, root / family)
        save_critic(root / family, root / f"critic-{family}")
        torch.save(vars(reference_step(root / f"critic-{family}", make_batch())), root / f"{family}.pt")
    return root


def make_config(folder: Path | None, layout: dict[str, Any], max_tokens: int = 60, **more: Any) -> Config:
    parallel = {name: value for name, value in layout.items() if name != "distributed"}
    return Config.model_validate(
        {
            "parallel": {"timeout_s": HANG_S, **parallel},
            "advantage": {"kind": "gae", "gamma": GAMMA, "lam": LAM, "whiten_tokens": False},
            "critic": {"path": folder and str(folder), "lr": LR, "clip": CLIP, "epochs_per_step": NUM_UPDATES},
            "optimizer": {"eps": ADAM_EPS, "clip_grad": 1e9, "distributed": layout.get("distributed", False)},
            "train": {"max_tokens_per_microbatch": max_tokens},
            **more,
        }
    )


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{what}: {m}"
    )


def make_advantages(config: Config, policy_path: Path) -> tuple[MegatronLearner, ValueAdvantages, Critic]:
    policy = MegatronLearner(resolve(config, policy_path))
    advantages = ValueAdvantages(resolve(config, policy_path), policy)
    assert advantages.critic is not None
    return policy, advantages, advantages.critic


def check_step(root: Path, family: str, layout: dict[str, Any], max_tokens: int) -> None:
    want = Reference(**torch.load(root / f"{family}.pt", weights_only=True))
    assert 0.05 < want.clip_shares[-1] < 0.95, "clipping should act on some tokens"
    batch = make_batch()
    config = make_config(root / f"critic-{family}", layout, max_tokens)
    _, advantages, critic = make_advantages(config, root / family)
    out = advantages.on(batch, step=0)
    assert_close(out.advantages_T, want.advantages_T, "advantages")
    for name, expected in (("loss", want.losses), ("clip_share", want.clip_shares), ("grad_norm", want.grad_norms)):
        mean = sum(expected) / NUM_UPDATES
        assert out.metrics[f"critic/{name}"] == pytest.approx(mean, rel=TOLERANCE, abs=TOLERANCE), name
    for name, gradient in critic.named_gradients():
        assert critic.layout.rank > 0 or name in want.gradients
        if critic.layout.rank == 0:
            assert_close(gradient, want.gradients.pop(name), f"gradient of {name}")
    for name, weight in critic.weights().whole():
        if critic.layout.rank == 0:
            assert_close(weight, want.weights.pop(name), f"weight {name} after {NUM_UPDATES} updates")
    assert critic.layout.rank > 0 or not (want.gradients or want.weights)
    parallel_state.destroy_model_parallel()


def check_steps(rank: int, world_size: int, root: Path, cases: list[Case]) -> None:
    for family, layout, max_tokens in cases:
        try:
            check_step(root, family, layout, max_tokens)
        except AssertionError as error:
            raise AssertionError(f"{family}, {layout}, {max_tokens} tokens per micro-batch") from error


def check_one_process(rank: int, world_size: int, root: Path) -> None:
    check_steps(rank, world_size, root, [("qwen3", {}, 1000), ("qwen2", {}, 50), ("llama_biases", {}, 50)])
    check_new_critic(root)
    check_learning(root)
    check_refusals(root)


def check_new_critic(root: Path) -> None:
    """From the policy's weights, all values are 0 and the first update moves only the head. The policy stays."""
    config = make_config(None, {})
    policy, advantages, critic = make_advantages(config, root / "qwen2")
    before = {name: weight.clone() for name, weight in policy.weights().whole()}
    batch = make_batch()
    out = advantages.on(batch, step=0)
    discounts = [
        (GAMMA * LAM) ** (n - 1 - t)
        for n, p in zip(batch.seq_lens_S, prompt_lens(batch), strict=True)
        for t in range(n)
    ]
    rewards_T = batch.rewards_S.repeat_interleave(batch.seq_lens_S)
    assert_close(
        out.advantages_T, torch.tensor(discounts) * rewards_T * (batch.behaviour_logprobs_T != 0), "advantages"
    )
    assert out.metrics["critic/value_mean"] == 0
    assert critic.version == NUM_UPDATES
    assert policy.version == 0
    for name, weight in policy.weights().whole():
        assert torch.equal(weight, before[name]), name
    changed = {
        name for name, weight in critic.weights().whole() if name not in before or not weight.equal(before[name])
    }
    assert "score.weight" in changed
    assert len(changed) > 1, "later updates move the body too"
    parallel_state.destroy_model_parallel()

    critic_config = make_config(None, {}, critic={"lr": LR})
    _, advantages, critic = make_advantages(critic_config, root / "qwen2")
    advantages.on(batch, step=0)
    changed = {
        name for name, weight in critic.weights().whole() if name not in before or not weight.equal(before[name])
    }
    assert changed == {"score.weight"}
    parallel_state.destroy_model_parallel()

    grpo = MegatronLearner(resolve(Config(), root / "qwen2"))
    without = ValueAdvantages(resolve(Config(), root / "qwen2"), grpo)
    assert without.on(batch, step=0) is batch
    assert without.parts == {}
    masked = replace(batch, mask_T=torch.zeros_like(batch.mask_T))
    parallel_state.destroy_model_parallel()
    _, advantages, critic = make_advantages(critic_config, root / "qwen2")
    assert advantages.on(masked, step=0) is masked
    parallel_state.destroy_model_parallel()


def check_learning(root: Path) -> None:
    """With two kinds of tokens in responses, one of them rewarded, the values of unseen batches tell them apart."""
    config = make_config(None, {}, 400, critic={"lr": 1e-2, "epochs_per_step": 2}, advantage={"kind": "n_step"})
    _, advantages, _ = make_advantages(config, root / "qwen3")
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(8):
        kinds_S = torch.randint(0, 2, (24,), generator=generator)
        lens_S = torch.randint(6, 14, (24,), generator=generator)
        kinds_T = kinds_S.repeat_interleave(lens_S)
        batch = Batch(
            token_ids_T=torch.randint(0, 16, kinds_T.shape, generator=generator) + 16 * kinds_T,
            seq_lens_S=lens_S,
            sampled_T=torch.cat([torch.arange(n) >= 3 for n in lens_S]),
            advantages_T=torch.zeros(kinds_T.shape),
            behaviour_logprobs_T=torch.zeros(kinds_T.shape),
            versions_T=torch.zeros_like(kinds_T),
            mask_T=torch.cat([torch.arange(n) >= 3 for n in lens_S]),
            rewards_S=kinds_S.float(),
        )
        found.append(advantages.on(batch, step).metrics["critic/explained_variance"])
    assert found[0] == 0, "all values of a new critic are equal"
    assert min(found[-2:]) > 0.8, found
    parallel_state.destroy_model_parallel()


def check_refusals(root: Path) -> None:
    save_critic(root / "qwen3", root / "two-outputs", num_outputs=2)
    shutil.copytree(root / "qwen3", root / "small")
    hf_config = json.loads((root / "small" / "config.json").read_text())
    weights = load_file(root / "small" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:20].clone()
    save_file(weights, root / "small" / "model.safetensors", metadata={"format": "pt"})
    (root / "small" / "config.json").write_text(json.dumps(hf_config | {"vocab_size": 20}))
    (root / "small" / "tokenizer.json").write_text("{}")
    for name, error, message in (
        ("two-outputs", CheckpointError, "score.weight (model.safetensors) is [2, 32], config.json says [1, 32]"),
        ("small", ConfigError, "a vocabulary of 20 tokens, but the policy's has 33"),
        ("nowhere", CheckpointError, "critic.path = "),
    ):
        config = make_config(root / name, {})
        policy = MegatronLearner(resolve(config, root / "qwen3"))
        with pytest.raises(error, match=re.escape(message)):
            ValueAdvantages(resolve(config, root / "qwen3"), policy)
        parallel_state.destroy_model_parallel()


def test_one_process_equals_reference(folder: Path) -> None:
    run_distributed(check_one_process, 1, folder)


@pytest.mark.slow
def test_two_processes_equal_reference(folder: Path) -> None:
    cases: list[Case] = [
        ("qwen3", {"tensor": 2}, 60),
        ("qwen2", {"tensor": 2, "sequence": True}, 60),
        ("qwen2", {"pipeline": 2}, 60),
        ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}, 1000),
        ("qwen3", {"context": 2}, 30),
        ("qwen2", {"data": 2, "distributed": True}, 60),
    ]
    run_distributed(check_steps, 2, folder, cases)


def check_resumed(rank: int, world_size: int, root: Path) -> None:
    """Take a step, save, take another step; then load the checkpoint at other layouts and repeat that step."""
    batch, store = make_batch(), CheckpointStore(root / "saved", CheckpointConfig())
    config = make_config(root / "critic-qwen2", {"tensor": 2})
    policy, advantages, critic = make_advantages(config, root / "qwen2")
    advantages.on(batch, step=0)
    store.save(1, {"learner": policy, **advantages.parts}, {})
    want = advantages.on(batch, step=1)
    weights = {name: weight.clone() for name, weight in critic.weights().whole()}
    parallel_state.destroy_model_parallel()
    for layout in ({"tensor": 2}, {"pipeline": 2}, {"data": 2, "distributed": True}):
        policy, advantages, critic = make_advantages(make_config(None, layout), root / "qwen2")
        store.resume({"learner": policy, **advantages.parts})
        assert critic.version == NUM_UPDATES
        got = advantages.on(batch, step=1)
        tolerance = 0.0 if layout == {"tensor": 2} else TOLERANCE
        assert got.metrics == pytest.approx(want.metrics, rel=tolerance, abs=tolerance), layout
        for name, weight in critic.weights().whole():
            torch.testing.assert_close(weight, weights[name], rtol=tolerance, atol=tolerance)
        parallel_state.destroy_model_parallel()


def check_skips(rank: int, world_size: int, root: Path) -> None:
    """Gradients that are not finite leave the weights unchanged; too many in a row end the run, even a resumed one."""
    batch, store = make_batch(), CheckpointStore(root / "saved-skips", CheckpointConfig())
    broken = replace(batch, rewards_S=torch.full_like(batch.rewards_S, torch.nan))
    config = make_config(root / "critic-qwen2", {"pipeline": 2})
    policy, advantages, critic = make_advantages(config, root / "qwen2")
    before = {name: weight.clone() for name, weight in critic.weights().whole()}
    for num_steps in range(1, MAX_SKIPPED_IN_A_ROW // NUM_UPDATES + 1):
        assert advantages.on(broken, step=0).metrics["critic/skipped"] == num_steps * NUM_UPDATES
    assert all(torch.equal(weight, before[name]) for name, weight in critic.weights().whole())
    store.save(1, {"learner": policy, **advantages.parts}, {})
    parallel_state.destroy_model_parallel()

    policy, advantages, _ = make_advantages(config, root / "qwen2")
    store.resume({"learner": policy, **advantages.parts})
    with pytest.raises(DivergedError, match=rf"the critic's last {MAX_SKIPPED_IN_A_ROW} updates .* lower critic\.lr"):
        advantages.on(broken, step=1)
    parallel_state.destroy_model_parallel()


def test_a_critic_that_only_skips_ends_the_run(folder: Path) -> None:
    run_distributed(check_skips, 2, folder)


def test_it_is_saved_with_the_policy_and_resumes_at_any_layout(folder: Path) -> None:
    run_distributed(check_resumed, 2, folder)
