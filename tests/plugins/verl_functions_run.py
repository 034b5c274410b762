"""Records what verl's functions of losses and advantages return for random cases; runs where verl is installed.

usage: verl_functions_run.py OUT.json NUM_CASES

`same_as_verl.py` compares ours with the recording.

Shape legend: B responses, T places of the longest one, with those that are not trained.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig

ACTOR = {"strategy": "fsdp", "rollout_n": 8, "ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": False}


def mask_of(g: torch.Generator, rows: int, width: int) -> Tensor:
    """Return responses of random lengths, whose last token is trained, with gaps."""
    mask_BT = torch.rand(rows, width, generator=g) < 0.8
    for row_T, last in zip(mask_BT, torch.randint(0, width, (rows,), generator=g).tolist(), strict=True):
        row_T[last] = True
        row_T[last + 1 :] = False
    return mask_BT.double()


def losses(g: torch.Generator, case: int) -> dict[str, Any]:
    """Record loss and gradient of one update that is one micro-batch."""
    rows, width = 4, 10
    old_BT = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 3
    shift_BT = torch.randn(rows, width, generator=g, dtype=torch.float64) * [0.05, 0.3, 1.0][case % 3]
    new_BT = -(old_BT + shift_BT).abs() - 1e-3  # no two are equal
    by_token = torch.randn(rows, width, generator=g, dtype=torch.float64)
    advantages_BT = by_token if case % 2 else by_token[:, :1].expand(rows, width)
    mask_BT = mask_of(g, rows, width)

    def chosen(*choices: float) -> float:
        return choices[int(torch.randint(0, len(choices), (), generator=g))]

    low, high, cap = chosen(0.02, 0.2), chosen(0.05, 0.3), chosen(1.5, 20.0)
    share, penalty, band_low, band_high = chosen(0.01, 0.1, 0.5), chosen(0.1, 1.0), chosen(-0.1, 0.1), chosen(0.5, 5.0)
    bounds = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": cap}
    cov = {"clip_cov_ratio": 1.0, "clip_cov_lb": band_low, "clip_cov_ub": band_high}  # the lottery takes all
    options: dict[str, tuple[dict[str, float], dict[str, float]]] = {
        "gpg": ({}, {}),
        "dppo_tv": (bounds, {}),
        "dppo_kl": (bounds, {}),
        "clip_cov": (bounds, cov),
        "kl_cov": ({}, {"kl_cov_ratio": share, "ppo_kl_coef": penalty}),
    }
    found = {}
    for name, (actor, policy) in options.items():
        config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **policy), **actor, **ACTOR)
        x_BT = new_BT.clone().requires_grad_()
        loss, _ = get_policy_loss_fn(name)(old_BT, x_BT, advantages_BT.clone(), mask_BT, "token-mean", config)
        (gradient_BT,) = torch.autograd.grad(loss, x_BT)
        found[name] = {"settings": actor | policy, "loss": loss.item(), "gradient": gradient_BT.tolist()}
    columns = {"old": old_BT, "new": new_BT, "advantages": advantages_BT, "mask": mask_BT}
    return {name: x_BT.tolist() for name, x_BT in columns.items()} | {"losses": found}


def advantages(g: torch.Generator, case: int) -> dict[str, Any]:
    """Record the advantages of a batch of two to four groups; the last group of some has one response."""
    sizes = torch.randint(2, 6, (2 + case % 3,), generator=g).tolist()
    sizes = [*sizes[:-1], 1] if case % 4 == 3 else sizes
    index = np.array([i for i, size in enumerate(sizes) for _ in range(size)])
    mask_BT = mask_of(g, len(index), 8)
    parts_PB = torch.randint(0, 3, (2, len(index)), generator=g).double() / [1.0, 2.0, 3.0][case % 3]
    weights, gamma = [1.0, 0.25], [1.0, 0.9][case % 2]
    reward_B = torch.tensor(weights, dtype=torch.float64) @ parts_PB
    reward_BT = torch.zeros_like(mask_BT)
    lasts = [int(row.nonzero().max()) for row in mask_BT]
    reward_BT[torch.arange(len(index)), lasts] = reward_B

    def of(name: str, reward_BT: Tensor = reward_BT, mask_BT: Tensor = mask_BT, **more: Any) -> Any:
        return get_adv_estimator_fn(name)(reward_BT.clone(), mask_BT, index=index, **more)[0].tolist()

    one_B1 = torch.ones(len(index), 1, dtype=torch.float64)
    keys = {"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": weights}
    found = {
        "grpo": of("grpo"),
        "dr_grpo": of("grpo", norm_adv_by_std_in_grpo=False),
        "rloo": of("rloo"),
        "reinforce_plus_plus_baseline": of("reinforce_plus_plus_baseline"),
        "reinforce_plus_plus": get_adv_estimator_fn("reinforce_plus_plus")(
            reward_BT.clone(), mask_BT, config=SimpleNamespace(gamma=gamma)
        )[0].tolist(),
        "gdpo": of(  # at one token per response: verl whitens over tokens, we over responses
            "gdpo",
            one_B1,
            one_B1,
            config=keys,
            non_tensor_batch=dict(zip(keys["gdpo_reward_keys"], parts_PB.numpy(), strict=True)),
            batch={"prompts": one_B1, "attention_mask": torch.ones(len(index), 2, dtype=torch.int64)},
        ),
    }
    lists = {"mask": mask_BT.tolist(), "parts": parts_PB.tolist(), "groups": index.tolist()}
    return lists | {"weights": weights, "gamma": gamma, "advantages": found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(54)
    cases = range(int(sys.argv[2]))
    recording = {
        "version": verl.__version__,
        "losses": [losses(g, case) for case in cases],
        "advantages": [advantages(g, case) for case in cases],
    }
    Path(sys.argv[1]).write_text(json.dumps(recording) + "\n")
