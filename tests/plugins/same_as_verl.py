"""Our losses and advantages against what verl's functions returned, as `verl_functions_run.py` recorded it.

Shape legend: B responses, T places of the longest one; R all places of an update.
"""

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.config.losses import LOSS_SECTIONS
from bapo_megatron.config.schema import Config
from bapo_megatron.config.schema_loss import SelectingLoss
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment
from tests.unit.loss_inputs import fixed_bounds, found_of, loss_inputs


def check(recording: Any) -> None:
    """Compare all cases."""
    for case in recording["losses"]:
        check_losses(case)
    for case in recording["advantages"]:
        check_advantages(case)


def check_losses(case: Any) -> None:
    """Compare loss and gradient of an update that is one micro-batch, so that verl too selects over the update.

    A share below one token is one token in verl and none here: ours is then compared at a share of one token.
    """
    old_R, new_R, advantages_R, mask_R = (double(case[name]) for name in ("old", "new", "advantages", "mask"))
    num_trained = int(mask_R.sum())
    for name, theirs in case["losses"].items():
        settings = settings_of(name, theirs["settings"])
        inputs = loss_inputs(
            log_probs_R=new_R.clone().requires_grad_(),
            behaviour_logprobs_R=old_R,
            advantages_R=advantages_R,
            mask_R=mask_R.bool(),
            bounds=None,  # type: ignore[arg-type]
        )
        if settings.get("share", 1.0) * num_trained < 1:
            assert found_of(LOSS_SECTIONS[name].model_validate(settings), inputs).num_selected == 0
            settings["share"] = 1.5 / num_trained
        loss, gradient_R = loss_of(settings, inputs)
        assert loss / num_trained == pytest.approx(theirs["loss"], rel=1e-9, abs=1e-9), name
        torch.testing.assert_close(gradient_R / num_trained, double(theirs["gradient"]), rtol=1e-9, atol=1e-12)


def settings_of(name: str, theirs: dict[str, float]) -> dict[str, Any]:
    """Return our loss with verl's settings."""
    if name == "gpg":
        return {"name": "reinforce"}
    if name == "kl_cov":
        return {"name": name, "share": theirs["kl_cov_ratio"], "penalty": theirs["ppo_kl_coef"]}
    low, high = theirs["clip_ratio_low"], theirs["clip_ratio_high"]
    if name == "clip_cov":
        band = {"covariance_low": theirs["clip_cov_lb"], "covariance_high": theirs["clip_cov_ub"]}
        return {"name": name, "share": theirs["clip_cov_ratio"], "clip_low": 1 - low, "clip_high": 1 + high} | band
    return {"name": name, "max_fall": low, "max_rise": high, "max_ratio": theirs["clip_ratio_c"]}


def loss_of(settings: dict[str, Any], inputs: LossInputs) -> tuple[float, Tensor]:
    """Return the sum over tokens and its gradient."""
    config: Any = LOSS_SECTIONS[settings["name"]].model_validate(settings)
    found = found_of(config, inputs) if isinstance(config, SelectingLoss) else fixed_bounds(config)
    total = config.tokens(replace(inputs, found=found)).loss_R.sum()
    return float(total.detach()), torch.autograd.grad(total, inputs.log_probs_R)[0]


def check_advantages(case: Any) -> None:
    """Compare the advantages of a batch.

    A response alone in its group has its reward as its advantage in verl and 0 here, which moves means over the batch.
    """
    mask_BT, rewards_B = torch.tensor(case["mask"]).bool(), torch.tensor(case["weights"]) @ torch.tensor(case["parts"])
    is_alone_B = torch.tensor([case["groups"].count(group) == 1 for group in case["groups"]])
    for kind, theirs in case["advantages"].items():
        of_plain_sums = kind in ("grpo", "dr_grpo", "rloo")
        if is_alone_B.any() and not of_plain_sums and kind != "reinforce_plus_plus":
            continue
        got_BT, wanted_BT = torch.zeros(mask_BT.shape), torch.tensor(theirs)
        got_BT[mask_BT] = advantages_of(kind, case)
        if of_plain_sums:
            lonely = wanted_BT[mask_BT & is_alone_B[:, None]]
            torch.testing.assert_close(lonely, rewards_B[:, None].expand_as(mask_BT)[mask_BT & is_alone_B[:, None]])
            wanted_BT[is_alone_B] = 0.0
        torch.testing.assert_close(got_BT, wanted_BT * mask_BT, rtol=1e-5, atol=1e-6, msg=kind)


def advantages_of(kind: str, case: Any) -> Tensor:
    """Return our advantages of the trained tokens, response after response."""
    weights = dict(zip(("first", "second"), case["weights"], strict=True))
    settings = {"advantage": {"kind": kind, "gamma": case["gamma"]}, "reward": {"weights": weights}}

    def sample(prompt: Prompt, row: int) -> Sample:
        parts = {name: of_part[row] for name, of_part in zip(weights, case["parts"], strict=True)}
        runs = [(is_trained, len(list(run))) for is_trained, run in groupby(case["mask"][row])]
        segments = [
            Segment.sampled(0, 0, (5,) * n, (-1.0,) * n) if is_trained else Segment.given("environment", (6,) * n)
            for is_trained, n in runs
        ]
        end = Ended("stop", sum(weights[name] * part for name, part in parts.items()), parts=parts)
        return Sample.of(f"{prompt.prompt_id}.{row}", prompt, segments, end)

    groups = []
    for number, rows in groupby(range(len(case["groups"])), lambda row: case["groups"][row]):
        prompt = Prompt(number, (1,), "?", "a", "test")
        groups.append(Group(prompt, tuple(sample(prompt, row) for row in rows)))
    if kind == "gdpo":  # verl's was recorded at one token per response, and turns count once each
        groups = [replace(g, samples=tuple(one_turn(s) for s in g.samples)) for g in groups]
    batch = BatchBuilder(Config.model_validate(settings)).build(groups, {})
    advantages_R = batch.advantages_T[batch.sampled_T]
    if kind != "gdpo":
        return advantages_R
    return torch.cat([a.expand(int(sum(row))) for a, row in zip(advantages_R, case["mask"], strict=True)])


def one_turn(sample: Sample) -> Sample:
    """Return the sample with a single token."""
    assert isinstance(sample.need, Ended)
    return Sample.of(sample.sample_id, sample.prompt, [Segment.sampled(0, 0, (5,), (-1.0,))], sample.need)


def double(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).flatten()
