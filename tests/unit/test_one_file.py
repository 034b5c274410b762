"""docs/examples/one_file.py computes what the package computes, and it learns."""

import ast
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bapo_megatron.algorithms.advantages import GroupView, SampleView, grpo
from bapo_megatron.algorithms.losses import ScoredTokens
from bapo_megatron.algorithms.objectives.clipped import BapoLoss
from bapo_megatron.algorithms.update_rules import no_tokens, update_rule
from bapo_megatron.config.schema_loss import ClipBoundConfig
from bapo_megatron.types import ClipBounds, Prompt
from tests.unit.loss_inputs import loss_inputs

FILE = Path(__file__).parents[2] / "docs" / "examples" / "one_file.py"
ONE = SimpleNamespace(**runpy.run_path(str(FILE)))


def test_it_needs_only_torch() -> None:
    imports = [node for node in ast.walk(ast.parse(FILE.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}
    assert len(FILE.read_text().splitlines()) <= 200


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 1.0], [0.25, 0.5, 1.0], [0.5, 0.5], [1.0]])
def test_advantages_are_the_package_s(rewards: list[float]) -> None:
    view = GroupView(Prompt(0, (1,), "", None, ""), tuple(SampleView(reward, (1,), "stop") for reward in rewards))
    ours = ONE.group_advantages(torch.tensor(rewards, dtype=torch.float64))
    torch.testing.assert_close(ours, grpo(view), rtol=1e-12, atol=0)


def found_by_the_package(tokens: ScoredTokens) -> ClipBounds:
    rule = update_rule(BapoLoss(), ClipBoundConfig())
    table = no_tokens(rule) + rule.table(tokens, None)
    bounds = rule.decide(table, None)
    assert isinstance(bounds, ClipBounds)
    return bounds


BIASES = {"balanced": 0.0, "few_good": 1.5, "many_good": -1.5, "no_good": 9.0, "no_bad": -9.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_bounds_loss_and_gradients_are_the_package_s(dtype: torch.dtype, bias: float, spread: float) -> None:
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        behaviour, moved, noise = (torch.randn(50, generator=random, dtype=dtype) for _ in range(3))
        behaviour, advantages = -behaviour.abs(), noise - bias
        ours, theirs = ((behaviour + spread * moved).requires_grad_() for _ in range(2))

        low, high = ONE.find_bounds((ours.detach() - behaviour).exp(), advantages)
        loss = ONE.bapo_loss(ours, behaviour, advantages, low, high).mean()
        loss.backward()

        columns = {"behaviour_logprobs_R": behaviour, "advantages_R": advantages, "log_probs_R": theirs}
        mask_R = torch.ones(50, dtype=torch.bool)
        nowhere = ClipBounds(1.0, 1.0, 0.0, saturated=False, num_moves=0)
        bounds = found_by_the_package(loss_inputs(**columns, mask_R=mask_R, bounds=nowhere))
        loss_R = BapoLoss().tokens(loss_inputs(**columns, mask_R=mask_R, bounds=bounds)).loss_R
        (loss_R.sum() / len(loss_R)).backward()

        assert (low, high) == (bounds.low, bounds.high)
        torch.testing.assert_close(loss, loss_R.mean())
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_cases_above_end_at_the_start_inside_and_at_the_limits() -> None:
    found = set()
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        ratio, noise = (0.3 * torch.randn(50, generator=random)).exp(), torch.randn(50, generator=random)
        found |= {ONE.find_bounds(ratio, noise - bias) for bias in BIASES.values()}
    assert {(0.6, 1.2), (0.9, 3.0)} < found


def test_log_probs_while_sampling_are_those_while_learning() -> None:
    torch.manual_seed(1)
    policy = ONE.Policy()
    prompts = ONE.prompts()[0][:16]
    response, behaviour, mask = ONE.sample(policy, prompts)
    with torch.no_grad():
        torch.testing.assert_close(ONE.score(policy, prompts, response), behaviour, rtol=1e-4, atol=1e-5)
    assert mask[:, 0].all()
    after_end = (response == ONE.END).cumsum(1) - (response == ONE.END).long() > 0
    assert (mask == ~after_end).all()


def test_no_prompt_is_trained_on_and_evaluated_on() -> None:
    training, held_out = ({tuple(prompt) for prompt in part.tolist()} for part in ONE.prompts())
    assert not training & held_out
    prompt, answer = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 2, 1, ONE.END]])
    assert ONE.judge(prompt, answer).tolist() == [1.0]


def test_the_reward_on_held_out_prompts_rises() -> None:
    rewards = ONE.main(num_steps=20)
    assert len(rewards) == 3
    assert rewards[-1] > rewards[0] + 0.3, "0.06 -> 0.81 when this was written"
