"""BAPO in miles' own `loss_function`, on one rank, against miles' own policy loss and a plain loop.

usage: python tests/plugins/miles_run.py CHECKOUT [--record tests/plugins/recorded/miles.json]

CHECKOUT is a folder that holds miles' package. It prints one line and fails if anything differs.
"""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.plugins.literal import as_lists, literal_bounds

NUM_UPDATES = 8


def host_args() -> Namespace:
    module = "bapo_megatron.plugins.miles"
    return Namespace(
        loss_type="custom_loss",
        custom_loss_function_path=f"{module}.bapo_loss",
        custom_megatron_before_train_step_hook_path=f"{module}.before_train_step",
        bapo={"scope": "lagged", "rho0": 0.45},
        train_backend="megatron",
        recompute_loss_function=False,
        allgather_cp=False,
        calculate_per_token_loss=False,
        use_rollout_logprobs=True,
        skip_actor_forward_only=False,
        true_on_policy_mode=False,
        rollout_temperature=1.0,
        log_probs_chunk_size=-1,
        entropy_coef=0.0,
        observe_training_entropy=False,
        eps_clip=0.2,
        eps_clip_high=0.2,
        eps_clip_c=None,
        advantage_estimator="grpo",
        use_opsm=False,
        use_tis=False,
        get_mismatch_metrics=False,
        use_kl_loss=False,
        use_unbiased_kl=False,
        qkv_format="thd",
        custom_tis_function_path=None,
        custom_pg_loss_reducer_function_path=None,
        rollout_batch_size=6,
        n_samples_per_prompt=1,
        global_batch_size=3,
        use_dynamic_global_batch_size=False,
        multi_lora=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout")
    parser.add_argument("--record", type=Path)
    o = parser.parse_args()
    sys.path.insert(0, o.checkout)
    sys.modules.setdefault("ray", MagicMock())  # miles.utils.misc imports it, but nothing here uses it
    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from miles.backends.training_utils import loss as miles_loss
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    names = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    set_parallel_state(ParallelState(**{n: GroupInfo(rank=0, size=1, group=dist.group.WORLD) for n in names}))
    miles_loss.is_multi_lora_enabled = lambda _: False
    from bapo_megatron.plugins import miles as plugin

    args, g = host_args(), torch.Generator().manual_seed(0)
    num_bounds = num_losses = 0
    recorded, seen, want = [], [], None
    for step in range(NUM_UPDATES):
        plugin.before_train_step(args, 0, step, None, None, None)
        search = plugin.PATHS.search
        assert search is not None
        bounds = search.bounds
        seen.append((bounds.low, bounds.high))
        num_bounds += want in (None, seen[-1])
        prompts, responses = [4, 3, 5], [9, 14, 6]
        tokens = [torch.randint(0, 32, (p + r,), generator=g) for p, r in zip(prompts, responses, strict=True)]
        full = torch.randn(1, sum(prompts) + sum(responses), 32, generator=g).requires_grad_()
        new, start = [], 0
        for t, p, r in zip(tokens, prompts, responses, strict=True):
            rows = full.detach()[0, start + p - 1 : start + p + r - 1].log_softmax(-1)
            new.append(rows.gather(1, t[p:, None]).squeeze(1))
            start += p + r
        batch = {
            "unconcat_tokens": tokens,
            "total_lengths": [len(t) for t in tokens],
            "response_lengths": responses,
            "loss_masks": [(torch.rand(r, generator=g) < 0.9).float() for r in responses],
            "advantages": [torch.full((r,), float(torch.randn(1, generator=g) - 0.1)) for r in responses],
            "rollout_log_probs": [x + 0.4 * torch.randn(x.shape, generator=g) for x in new],
            "log_probs": new,
        }
        ours, _, log = miles_loss.loss_function(args, batch, 1, full)
        at_bounds = {"loss_type": "policy_loss", "eps_clip": 1 - bounds.low, "eps_clip_high": bounds.high - 1}
        theirs, _, _ = miles_loss.loss_function(Namespace(**{**vars(args), **at_bounds}), batch, 1, full)
        gradients = [torch.autograd.grad(loss, full)[0] for loss in (ours, theirs)]
        num_losses += torch.allclose(ours, theirs, rtol=1e-6) and torch.allclose(*gradients, rtol=1e-5, atol=1e-8)
        kept = torch.cat(batch["loss_masks"]).bool()
        ratio = (torch.cat(new) - torch.cat(batch["rollout_log_probs"])).exp()[kept]
        weight = torch.cat([mask / mask.sum() for mask in batch["loss_masks"]])[kept]
        want = literal_bounds((ratio, torch.cat(batch["advantages"])[kept], weight), search.config)
        record = {name: batch[name] for name in ("advantages", "rollout_log_probs", "loss_masks")}
        recorded.append(as_lists({"step": step, "bounds": seen[-1], "log_probs": new, **record}))
        recorded[-1]["pg_loss"] = dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))["pg_loss"]
    print(
        f"miles: bounds of {num_bounds} updates and {num_losses} losses of {NUM_UPDATES} are equal; {sorted(set(seen))}"
    )
    assert (num_bounds, num_losses) == (NUM_UPDATES, NUM_UPDATES)
    assert len(set(seen)) > 1
    if o.record:
        o.record.write_text(json.dumps({"args": vars(args), "micro_batches": recorded}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
