"""BAPO around Megatron-LM's `forward_step`, with the checkout's own `calculate_grpo_loss`, against plain formulas.

usage: torchrun --nproc_per_node 2 tests/plugins/megatron_lm_run.py CHECKOUT
       [--record tests/plugins/recorded/megatron_lm.json]

The rest of train_rl.py asks for CUDA: `calculate_grpo_loss` is taken from megatron/rl/rl_utils.py. `forward_step` and
`loss_func` here follow the contract of train_rl.py, whose text is checked for it.
"""

import argparse
import ast
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bapo_megatron.plugins.host import Host
from bapo_megatron.plugins.megatron_lm import BAPOForwardStep
from tests.plugins.literal import as_lists, clipped, literal_bounds

NUM_UPDATES, NUM_MICRO_BATCHES, CAP = 8, 3, 2.0


def host_args() -> SimpleNamespace:
    return SimpleNamespace(
        curr_iteration=0,
        grpo_clamp_eps_lower=0.01,
        grpo_clamp_eps_upper=0.01,
        grpo_iterations=2,
        rl_use_sequence_packing=False,
        rl_inference_logprobs_is_correction=True,
        rl_importance_sampling_truncation_coef=CAP,
    )


def host_loss(checkout: Path) -> Callable[..., Any]:
    tree = ast.parse((checkout / "megatron" / "rl" / "rl_utils.py").read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "calculate_grpo_loss")
    space = {"torch": torch, "logging": logging, "logger": logging.getLogger(), "log_single_rank": lambda *_: None}
    exec(compile(ast.Module([function], []), "rl_utils", "exec"), space)
    return space["calculate_grpo_loss"]


def host_version(checkout: Path) -> str:
    text = (checkout / "megatron" / "core" / "package_info.py").read_text()
    return ".".join(re.findall(r"(?m)^(?:MAJOR|MINOR|PATCH) = (\d+)$", text))


def check_contract(checkout: Path) -> None:
    """Check the plugin's assumptions about train_rl.py."""
    tree = ast.parse((checkout / "train_rl.py").read_text())
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert [a.arg for a in functions["loss_func"].args.args][:3] == ["loss_mask", "kl_term", "ratios"]
    assigned = [n for n in ast.walk(functions["forward_step"]) if isinstance(n, ast.Assign)]
    (batch,) = [n.targets[0] for n in assigned if ast.unparse(n.value) == "batch_data"]
    assert isinstance(batch, ast.Tuple)
    names = [ast.unparse(name) for name in batch.elts]
    assert (len(names), names[1], names[2], names[-1]) == (7, "advantages", "old_logprobs", "inference_logprobs")
    text = ast.unparse(functions["forward_step"])
    assert "clamp_eps_lower=args.grpo_clamp_eps_lower, clamp_eps_upper=args.grpo_clamp_eps_upper" in text
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "pretrain"]
    assert ast.unparse(call.args[3]) == "forward_step"


def loss_func(
    loss_mask: Tensor,
    kl_term: Tensor,
    ratios: Tensor,
    entropy_term: Tensor,
    truncated_from_above: Tensor,
    truncated_from_below: Tensor,
    output_tensor: Tensor,
) -> None:
    raise AssertionError("used only for its parameters' names")


def micro_batch(update: int, number: int, rank: int) -> tuple[Tensor, ...]:
    """Return current log-probs, advantages, old log-probs, mask, and the engine's log-probs."""
    g = torch.Generator().manual_seed(100 * update + 10 * number + rank)
    old = -torch.rand(4, 12, generator=g) * 3
    new = old + 0.3 * torch.randn(4, 12, generator=g)
    mask = (torch.rand(4, 12, generator=g) < 0.9).float()
    return new, torch.randn(4, generator=g), old, mask, old + 0.05 * torch.randn(4, 12, generator=g)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--record", type=Path)
    o = parser.parse_args()
    calculate, args = host_loss(o.checkout), host_args()
    check_contract(o.checkout)
    Host.version = property(lambda _: host_version(o.checkout))  # type: ignore[assignment, method-assign]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def forward_step(batches: Iterator[Any], model: Any, loss_only: bool = False) -> tuple[Tensor, Any]:
        new, advantages, old, mask, _, reference, sampled = next(batches)
        loss, kl, ratios, entropy, above, below = calculate(
            new,
            old,
            reference,
            advantages,
            args.grpo_clamp_eps_lower,
            args.grpo_clamp_eps_upper,
            0.0,
            0.0,
            inference_logprobs=sampled,
            is_truncation_coef=args.rl_importance_sampling_truncation_coef,
        )
        return loss, partial(loss_func, mask, kl, ratios, entropy, above, below)

    step = BAPOForwardStep(forward_step, lambda: args, {"rho0": 0.45})
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(1), all_reduce(*a, **k))
    want = (step.search.bounds.low, step.search.bounds.high)
    num_bounds = num_losses = 0
    recorded, seen = [], []
    for update in range(1, NUM_UPDATES + 1):
        args.curr_iteration = update
        for number in range(NUM_MICRO_BATCHES):
            new, advantages, old, mask, sampled = micro_batch(update, number, rank)
            new.requires_grad_()
            loss, _ = step(iter([(new, advantages, old, mask, None, old, sampled)]), None)
            bounds = step.search.bounds
            weight = (old - sampled).exp().clamp(max=CAP)
            plain = weight * clipped((new - old).exp(), advantages[:, None], 1 - bounds.low, bounds.high - 1)
            gradients = [torch.autograd.grad((x * mask).sum(), new)[0] for x in (loss, plain)]
            num_losses += torch.allclose(loss, plain, rtol=1e-6) and torch.allclose(*gradients, rtol=1e-5, atol=1e-8)
            names = ("new", "advantages", "old", "mask", "sampled", "loss")
            values = (new, advantages, old, mask, sampled, loss)
            record = as_lists(dict(zip(names, values, strict=True)))
            recorded.append({"update": update, "bounds": (bounds.low, bounds.high), **record})
        seen.append((step.search.bounds.low, step.search.bounds.high))
        num_bounds += seen[-1] == want
        tokens: list[list[Tensor]] = [[], [], []]
        for other in range(world):
            for number in range(NUM_MICRO_BATCHES):
                new, advantages, old, mask, sampled = micro_batch(update, number, other)
                kept = mask.bool()
                tokens[0].append((new - old).exp()[kept])
                tokens[1].append(advantages[:, None].expand_as(new)[kept])
                tokens[2].append((old - sampled).exp().clamp(max=CAP)[kept])
        ratios, all_advantages, weights = (torch.cat(parts) for parts in tokens)
        want = literal_bounds((ratios, all_advantages, weights), step.search.config)
    if rank == 0:
        size = NUM_UPDATES * NUM_MICRO_BATCHES
        print(f"Megatron-LM, {world} ranks: bounds of {num_bounds} of {NUM_UPDATES} updates and {num_losses} of {size} "
              f"losses are equal, {len(calls)} all-reduces; {sorted(set(seen))}")  # fmt: skip
        assert (num_bounds, num_losses, len(calls)) == (NUM_UPDATES, size, NUM_UPDATES - 1)
        assert len(set(seen)) > 1
        if o.record:
            o.record.write_text(json.dumps(recorded) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
