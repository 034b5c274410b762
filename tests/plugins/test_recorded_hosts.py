"""slime, miles and Megatron-LM through what their hooks passed on, as the `*_run.py` scripts recorded from a checkout.

Their sources are not on a package index. The recordings hold tensors, the bounds, and the losses that the hosts' own
functions returned at these bounds.
"""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.errors import UserError
from bapo_megatron.plugins import megatron_lm, miles, slime
from bapo_megatron.plugins.function_paths import FunctionPaths
from bapo_megatron.plugins.megatron_lm import BAPOForwardStep
from tests.plugins.literal import clipped
from tests.plugins.megatron_lm_run import host_args as megatron_lm_args
from tests.plugins.megatron_lm_run import loss_func

RECORDED = Path(__file__).parent / "recorded"


@dataclass
class Reducer:
    """The mean over samples of their means over tokens, as the hosts do."""

    masks: list[Tensor]

    def __call__(self, values: Tensor) -> Tensor:
        parts = values.split([mask.numel() for mask in self.masks])
        return torch.stack([(x * m).sum() / m.sum() for x, m in zip(parts, self.masks, strict=True)]).sum()


def load(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def policy_loss(args: Namespace, batch: Any, logits: Tensor, reducer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = (torch.cat(batch["new"]) - torch.cat(batch["rollout_log_probs"])).exp()
    loss = reducer(clipped(ratio, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high))
    return loss, {"pg_loss": loss.detach()}


def paths_of(module: ModuleType, calls: list[Tensor] | None = None) -> FunctionPaths:
    """Return the plugin's functions, with the host's functions replaced by plain ones."""

    def summed(table: Tensor) -> Tensor:
        if calls is not None:
            calls.append(table)
        return table

    return replace(
        module.PATHS,
        log_probs=lambda args, batch, logits: batch["new"],
        policy_loss=policy_loss,
        sum_over_ranks=summed,
        has_loss=lambda: True,
        search=None,
    )


@pytest.mark.parametrize(("name", "module", "num_updates"), [("slime", slime, 6), ("miles", miles, 8)])
def test_function_paths(name: str, module: ModuleType, num_updates: int) -> None:
    recording, calls = load(name), []
    paths, args, step = paths_of(module, calls), Namespace(**recording["args"]), None
    for mb in recording["micro_batches"]:
        if mb["step"] != step:
            step = mb["step"]
            paths.before_train_step(args, 0, step, None, None, None)
        batch = {
            name: [torch.tensor(values) for values in mb[name]]
            for name in ("advantages", "rollout_log_probs", "loss_masks")
        }
        batch["new"] = [torch.tensor(values) for values in mb["log_probs"]]
        loss, metrics = paths.bapo_loss(args, batch, torch.zeros(1), Reducer(batch["loss_masks"]))
        assert paths.search is not None
        assert [paths.search.bounds.low, paths.search.bounds.high] == mb["bounds"]
        assert loss.item() == pytest.approx(mb["pg_loss"], rel=1e-4, abs=1e-6)
        num = len(batch["new"])
        assert metrics["bapo_high"].item() == pytest.approx(mb["bounds"][1] * num)
    assert (step, len(calls)) == (num_updates - 1, num_updates), "one all-reduce per update"
    assert len({tuple(mb["bounds"]) for mb in recording["micro_batches"]}) > 1


FITTING = {
    "loss_type": "custom_loss",
    "use_rollout_logprobs": False,
    "custom_megatron_before_train_step_hook_path": "bapo_megatron.plugins.slime.before_train_step",
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "global_batch_size": 8,
}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"advantage_estimator": "gspo"}, "--advantage-estimator gspo does not fit, choose from grpo, ppo"),
        ({"recompute_loss_function": True}, "--recompute-loss-function True does not fit"),
        ({"use_tis": True, "use_opsm": True}, "--use-opsm True does not fit, choose from False; --use-tis True"),
        ({"custom_megatron_before_train_step_hook_path": None}, "hook-path is not set"),
        ({"global_batch_size": 32}, "every ratio is 1 and no bound acts; set --num-steps-per-rollout above 1"),
        ({"train_backend": "fsdp"}, "--train-backend fsdp does not fit, choose from megatron"),
        ({"bapo": {"scope": "exact"}}, 'scope="exact" is not possible here, choose from lagged, smoothed, fixed'),
        ({"bapo": {"rho0": 2}}, "rho0 must be below 1"),
    ],
)
@pytest.mark.parametrize("module", [slime, miles])
def test_what_does_not_fit_is_refused_in_one_message(module: ModuleType, changes: dict[str, Any], part: str) -> None:
    paths = paths_of(module)
    with pytest.raises(UserError) as refused:
        paths.before_train_step(Namespace(**{**FITTING, **changes}), 0, 0, None, None, None)
    said = str(refused.value)
    assert said.startswith(f"BAPO in {paths.host.name} (version unknown): ")
    assert part in said
    assert f". What works, tried with {paths.host.name} {paths.host.tried[0]}: --loss-type custom_loss" in said


@pytest.mark.parametrize(
    ("bapo", "scope"),
    [({}, "lagged"), ({"preset": "paper"}, "lagged"), ({"preset": "wide"}, "fixed"), ({"scope": "fixed"}, "fixed")],
)
def test_the_scope_is_the_users_then_the_presets_then_the_hosts(bapo: dict[str, Any], scope: str) -> None:
    assert paths_of(slime).host.settings(bapo, "lagged", "smoothed", "fixed").scope == scope


def test_log_probs_that_the_engine_did_not_return_are_refused() -> None:
    paths = paths_of(slime)
    args = Namespace(**{**FITTING, "use_rollout_logprobs": True})
    batch = {
        "advantages": [torch.ones(3)],
        "rollout_log_probs": [torch.tensor([-1.0, torch.nan, -1.0])],
        "new": [-torch.ones(3)],
    }
    paths.before_train_step(args)
    with pytest.raises(UserError, match="rollout_log_probs is nan for 1 trained token, which the engine did not score"):
        paths.bapo_loss(args, batch, torch.zeros(1), Reducer([torch.ones(3)]))
    batch["rollout_log_probs"][0][1] = -1.0
    paths.bapo_loss(args, batch, torch.zeros(1), Reducer([torch.ones(3)]))


@pytest.fixture
def megatron_lm_of_0_20(monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(megatron_lm.MEGATRON_LM, module="megatron_lm_checkout")
    monkeypatch.setitem(sys.modules, "megatron_lm_checkout", SimpleNamespace(__version__="0.20.0"))
    monkeypatch.setattr(megatron_lm, "MEGATRON_LM", host)


def forward_step_of(args: Any) -> Any:
    def forward_step(batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        new, advantages, old, mask, _, _, sampled = next(batches)
        ratios = (new - old).exp()
        weight = (old - sampled).exp().clamp(max=args.rl_importance_sampling_truncation_coef)
        loss = weight * clipped(ratios, advantages[:, None], args.grpo_clamp_eps_lower, args.grpo_clamp_eps_upper)
        return loss, partial(loss_func, mask, None, ratios, None, None, None)

    return forward_step


@pytest.mark.usefixtures("megatron_lm_of_0_20")
def test_megatron_lm() -> None:
    args = megatron_lm_args()
    step = BAPOForwardStep(forward_step_of(args), lambda: args, {"rho0": 0.45})
    recording = load("megatron_lm")
    assert len(recording) == 24
    for mb in recording:
        args.curr_iteration = mb["update"]
        names = ("new", "advantages", "old", "mask", "sampled")
        new, advantages, old, mask, sampled = (torch.tensor(mb[name]) for name in names)
        loss, _ = step(iter([(new, advantages, old, mask, None, old, sampled)]), None)
        assert [step.search.bounds.low, step.search.bounds.high] == mb["bounds"]
        torch.testing.assert_close(loss, torch.tensor(mb["loss"]), rtol=1e-4, atol=1e-5)
    assert len({tuple(mb["bounds"]) for mb in recording}) > 1


@pytest.mark.usefixtures("megatron_lm_of_0_20")
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rl_use_sequence_packing": True}, "--rl-use-sequence-packing does not fit"),
        (
            {"grpo_iterations": 1, "grpo_prompts_per_step": 4, "grpo_group_size": 2, "global_batch_size": 8},
            "every ratio is 1 and no bound acts; set --grpo-iterations 2, or --global-batch-size below 8",
        ),
    ],
)
def test_arguments_of_megatron_lm_that_do_not_fit(changes: dict[str, Any], part: str) -> None:
    args = SimpleNamespace(**{**vars(megatron_lm_args()), **changes})
    step = BAPOForwardStep(forward_step_of(args), lambda: args, {})
    with pytest.raises(UserError) as refused:
        step(iter([]), None)
    assert str(refused.value).startswith("BAPO in Megatron-LM 0.20.0: ")
    assert part in str(refused.value)
    assert ". What works, tried with Megatron-LM 0.20: train_rl.py without --rl-use-sequence-packing" in str(
        refused.value
    )


@pytest.mark.usefixtures("megatron_lm_of_0_20")
def test_a_changed_train_rl_is_refused() -> None:
    args = megatron_lm_args()
    batch = tuple(torch.zeros(1, 2) for _ in range(7))
    step = BAPOForwardStep(lambda batches, model: (next(batches), partial(print, None)), lambda: args, {})
    with pytest.raises(UserError, match="batch or loss function differs from the versions tried"):
        step(iter([batch]), None)
    del args.grpo_clamp_eps_lower
    step = BAPOForwardStep(forward_step_of(args), lambda: args, {})
    with pytest.raises(UserError, match="has no grpo_clamp_eps_lower, which the plugin needs"):
        step(iter([batch]), None)


def test_an_untried_version_runs_with_a_warning_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(megatron_lm.MEGATRON_LM, tried=("0.0",))
    for value, refused in (("", True), ("0", True), ("1", False)):
        monkeypatch.setenv("BAPO_UNTRIED_HOST", value)
        with nullcontext() if refused else pytest.warns(UserWarning, match="not been tried with this version"):
            assert len(host.untried()) == refused


def test_an_untried_version_is_refused() -> None:
    """The Megatron-Core of this environment is older."""
    installed = re.escape(version("megatron-core"))
    with pytest.raises(UserError, match=f"BAPO in Megatron-LM {installed}: the plugin has not been tried with this"):
        BAPOForwardStep(forward_step_of(None), lambda: None, {})
