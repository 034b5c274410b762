"""verl's registered loss and `ppo_loss` against plain formulas; runs in an environment that holds verl.

usage: verl_run.py OUT.json NUM_CASES, or torchrun --nproc_per_node 2 verl_run.py OUT.json NUM_CASES
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

IS_FOUND = "bapo" in POLICY_LOSS_REGISTRY  # whether verl found it, through the entry point

from bapo_megatron.config.schema_loss import ClipBoundConfig  # noqa: E402
from bapo_megatron.errors import UserError  # noqa: E402
from bapo_megatron.plugins.verl import BAPOLossConfig  # noqa: E402

ACTOR = {"strategy": "fsdp", "rollout_n": 8, "ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": False}
DUAL_CLIP = 3.0  # verl's default
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
NUM_ALL_REDUCES = 0


def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    global NUM_ALL_REDUCES
    NUM_ALL_REDUCES += 1
    return REAL_ALL_REDUCE(tensor, *args, **kwargs)


REAL_ALL_REDUCE, dist.all_reduce = dist.all_reduce, counted


def literal_bounds(updates: list[tuple[float, tuple[Tensor, ...]]], c: ClipBoundConfig) -> tuple[float, float]:
    """Run the search, reading every token at every probe; each update has its weight."""

    def rho(low: float, high: float) -> float:
        positive = negative = 0.0
        for share, (r, a, w) in updates:
            if c.contribution == "gradient":
                positive += share * float((w * r * a)[(a > 0) & (r < high)].sum())
                negative += share * float((w * r * -a)[(a < 0) & (r > low)].sum())
            else:
                positive += share * float((w * r.clamp(max=high) * a)[a > 0].sum())
                negative += share * float((w * r.clamp(min=low) * -a)[a < 0].sum())
        whole = negative if c.contribution == "official" else positive + negative
        return positive / whole if whole else float("inf") if positive else float("nan")

    lows, highs, i, j = c.low.points, c.high.points, 0, 0
    while rho(lows[i], highs[j]) < c.rho0 * (1 - 1e-5):  # not for rounding alone
        if c.order == "low_first":
            if i < len(lows) - 1:
                i += 1
            elif j < len(highs) - 1:
                j += 1
            else:
                break
        elif i == len(lows) - 1:
            break
        elif j < len(highs) - 1:
            j += 1
        else:
            i += 1
    return lows[i], highs[j]


def everywhere(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Concatenate the tokens of all ranks."""
    if not dist.is_initialized():
        return tensors
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tensors)
    return tuple(torch.cat(parts) for parts in zip(*every, strict=True))


def weights(mask: Tensor, mode: str) -> Tensor:
    return mask / mask.sum(-1, keepdim=True).clamp(min=1) if mode == "seq-mean-token-mean" else mask.double()


def formula(old: Tensor, new: Tensor, adv: Tensor, mask: Tensor, mode: str, bounds: tuple[float, float]) -> Tensor:
    """Return PPO's clipped objective with dual clipping for one micro-batch."""
    ratio = (new - old).exp()
    objective = torch.min(ratio * adv, ratio.clamp(*bounds) * adv)
    objective = torch.where(adv < 0, torch.max(objective, DUAL_CLIP * adv), objective)
    total = (weights(mask, mode) * objective * mask).sum()
    return -total / (mask.sum() if mode == "token-mean" else (mask.sum(-1) > 0).sum())


def random_case(g: torch.Generator, case: int, rows: int = 4) -> tuple[Tensor, ...]:
    T = 40 if case % 3 else 120
    old = -torch.rand(rows, T, generator=g, dtype=torch.float64) * 4
    new = old + torch.randn(rows, T, generator=g, dtype=torch.float64) * [0.01, 0.1, 0.5, 1.2][case % 4]
    adv = torch.randn(rows, 1, generator=g, dtype=torch.float64) * 1.5 + [-0.6, 0.0, 0.3][case % 3]
    return old, new.requires_grad_(), adv.expand(rows, T), (torch.rand(rows, T, generator=g) < 0.9).double()


def actor(mode: str = "token-mean", train_batch_size: int | None = None, **bapo: Any) -> ActorConfig:
    loss = BAPOLossConfig(bapo=bapo, train_batch_size=train_batch_size)
    return ActorConfig(policy_loss=loss, loss_agg_mode=mode, **ACTOR)


def found(metrics: dict[str, Any]) -> tuple[float, float]:
    return metrics["actor/bapo/low"], metrics["actor/bapo/high"]


def check_micro_batches(g: torch.Generator, num_cases: int) -> dict[str, int]:
    """Check scope microbatch: bounds, loss and gradient of the registered loss."""
    loss_of, num_equal, seen = get_policy_loss_fn("bapo"), 0, set()
    before = NUM_ALL_REDUCES
    for case in range(num_cases):
        old, new, adv, mask = random_case(g, case)
        mode, preset = MODES[case % len(MODES)], ("official", "default")[case % 2]
        rho0 = [0.5, 0.667, 1.0, 1.5][case % 4] if preset == "official" else [0.4, 0.5, 0.6][case % 3]
        config = actor(mode, scope="microbatch", preset=preset, rho0=rho0)
        got, metrics = loss_of(old, new, adv, mask, mode, config)
        kept = mask.bool()
        tokens = everywhere((new - old).exp().detach()[kept], adv[kept], weights(mask, mode)[kept])
        bounds = literal_bounds([(1.0, tokens)], config.policy_loss._bapo_worker.search.config)
        want = formula(old, new, adv, mask, mode, bounds)
        gradients = [torch.autograd.grad(x, new)[0] for x in (got, want)]
        num_equal += (
            found(metrics) == bounds
            and torch.allclose(got, want, rtol=1e-9, atol=1e-12)
            and torch.allclose(*gradients, rtol=1e-9, atol=1e-12)
        )
        seen.add(bounds)
    return {"equal": num_equal, "bounds": len(seen), "all_reduces": NUM_ALL_REDUCES - before}


def check_mini_batches(g: torch.Generator, scope: str, num_minis: int = 20) -> dict[str, int]:
    """Check scopes lagged and smoothed: the bounds come from earlier mini-batches, however these are split."""
    loss_of, config = get_policy_loss_fn("bapo"), actor(scope=scope, rho0=0.6, smoothing_updates=3)
    search = ClipBoundConfig.model_validate({"rho0": 0.6})
    want, decay, num_equal, updates, seen = (search.low.start, search.high.start), 2 / 3, 0, [], set()
    world = dist.get_world_size() if dist.is_initialized() else 1
    for mini in range(num_minis):
        old, new, adv, mask = random_case(g, 2 + 4 * mini, rows=8)
        kept = mask.bool()
        updates.append(everywhere((new - old).exp().detach()[kept], adv[kept], torch.ones_like(adv)[kept]))
        config.global_batch_info.update(
            dp_size=world, batch_num_tokens=updates[-1][0].numel(), global_batch_size=8 * world, loss_scale_factor=None
        )
        used = set()
        for part in torch.arange(8).split([8, 4, 2, 1][mini % 4]):
            _, metrics = loss_of(old[part], new[part], adv[part], mask[part], "token-mean", config)
            used.add(found(metrics))
        num_equal += used == {want}
        past = [(decay ** (mini - k) if scope == "smoothed" else float(k == mini), u) for k, u in enumerate(updates)]
        want = literal_bounds(past, search)
        seen.add(want)
    return {"equal": num_equal, "bounds": len(seen)}


def check_ppo_loss(g: torch.Generator) -> bool:
    """Check verl's own `ppo_loss`, on the nested tensors that its engines pass on."""
    prompts, responses, advantages = [3, 5, 2], [6, 4, 7], (1.0, -1.0, 0.5)
    new = [(-torch.rand(p + r, generator=g)).requires_grad_() for p, r in zip(prompts, responses, strict=True)]
    old = [-torch.rand(r, generator=g) for r in responses]
    data = TensorDict(
        {
            "prompts": nested([torch.ones(p, dtype=torch.long) for p in prompts]),
            "responses": nested([torch.ones(r, dtype=torch.long) for r in responses]),
            "response_mask": nested([torch.ones(r, dtype=torch.long) for r in responses]),
            "old_log_probs": nested(old),
            "advantages": nested([torch.full((r,), a) for r, a in zip(responses, advantages, strict=True)]),
        },
        batch_size=[3],
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(responses), global_batch_size=3)
    config = actor(scope="microbatch", rho0=0.6)
    loss, _ = ppo_loss(config, {"log_probs": nested(new)}, data)
    loss.backward()
    # the log-prob of a token is at the place before it
    pairs = zip(new, prompts, responses, strict=True)
    mine = torch.cat([x.detach()[p - 1 : p - 1 + r] for x, p, r in pairs]).requires_grad_()
    adv = torch.cat([torch.full((r,), a) for r, a in zip(responses, advantages, strict=True)])
    tokens = ((mine - torch.cat(old)).exp().detach().double(), adv.double(), torch.ones(17).double())
    search = config.policy_loss._bapo_worker.search
    bounds = literal_bounds([(1.0, tokens)], search.config)
    want = formula(torch.cat(old)[None], mine[None], adv[None], torch.ones(1, 17), "token-mean", bounds)
    want.backward()
    pairs = zip(new, prompts, responses, strict=True)
    gradient = torch.cat([x.grad[p - 1 : p - 1 + r] for x, p, r in pairs])
    return (
        (search.bounds.low, search.bounds.high) == bounds
        and torch.allclose(loss, want.to(loss), rtol=1e-5)
        and torch.allclose(gradient, mine.grad.to(gradient), rtol=1e-4, atol=1e-7)
    )


def nested(tensors: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def refusals(g: torch.Generator) -> list[str]:
    said = []
    old, new, adv, mask = random_case(g, 0)
    broken = old.clone()
    broken[mask.bool()] = torch.nan
    for make, values in (
        (lambda: actor(scope="exact"), old),
        (lambda: actor(rho_0=0.4), old),
        (lambda: actor(train_batch_size=256), old),
        (lambda: actor(train_batch_size=512), broken),
    ):
        try:
            get_policy_loss_fn("bapo")(values, new, adv, mask, "token-mean", make())
        except UserError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    is_alone = "RANK" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo")
    rank = 0 if is_alone else dist.get_rank()
    g = torch.Generator().manual_seed(11 + rank)
    result: dict[str, Any] = {
        "version": verl.__version__,
        "is_found": IS_FOUND,
        "microbatch": check_micro_batches(g, int(sys.argv[2])),
        **{scope: check_mini_batches(g, scope) for scope in ("lagged", "smoothed")},
    }
    if is_alone:
        result |= {"ppo_loss": check_ppo_loss(g), "refusals": refusals(g)}
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    if not is_alone:
        dist.destroy_process_group()
