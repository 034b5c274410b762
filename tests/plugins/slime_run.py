"""BAPO in slime's own `loss_function`, over gloo, against slime's own policy loss and a plain loop over all ranks.

usage: torchrun --nproc_per_node N tests/plugins/slime_run.py CHECKOUT [--tp T] [--pp P] [--cp C] [--per-token]
       [--record tests/plugins/recorded/slime.json]

CHECKOUT is a folder that holds slime's package; megatron-core is installed. It prints one line and fails if anything
differs.
"""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.plugins.literal import as_lists, literal_bounds

NUM_UPDATES, NUM_MICRO_BATCHES, VOCABULARY = 6, 2, 32
NUM_ALL_REDUCES = 0


def host_args(per_token: bool) -> Namespace:
    module = "bapo_megatron.plugins.slime"
    return Namespace(
        loss_type="custom_loss",
        custom_loss_function_path=f"{module}.bapo_loss",
        custom_megatron_before_train_step_hook_path=f"{module}.before_train_step",
        bapo={"scope": "lagged", "rho0": 0.45},
        recompute_loss_function=False,
        allgather_cp=False,
        calculate_per_token_loss=per_token,
        use_rollout_logprobs=True,
        rollout_top_p=1.0,
        rollout_temperature=1.0,
        log_probs_chunk_size=-1,
        entropy_coef=0.0,
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
        value_clip=0.2,
        custom_tis_function_path=None,
        rollout_batch_size=6,
        n_samples_per_prompt=2,
        global_batch_size=6,
    )


def micro_batches(step: int, data_rank: int) -> list[dict[str, Any]]:
    """Return two micro-batches of three samples for a data rank, before any slicing."""
    g = torch.Generator().manual_seed(1000 * step + data_rank)
    found = []
    for _ in range(NUM_MICRO_BATCHES):
        prompts, responses = [4, 3, 5], [int(torch.randint(5, 20, (1,), generator=g)) for _ in range(3)]
        tokens = [torch.randint(0, VOCABULARY, (p + r,), generator=g) for p, r in zip(prompts, responses, strict=True)]
        logits = [torch.randn(len(t), VOCABULARY, generator=g) for t in tokens]
        new = [
            x.log_softmax(-1)[p - 1 : -1].gather(1, t[p:, None]).squeeze(1)
            for x, t, p in zip(logits, tokens, prompts, strict=True)
        ]
        found.append(
            {
                "tokens": tokens,
                "responses": responses,
                "logits": logits,
                "new": new,
                "old": [x + 0.35 * torch.randn(x.shape, generator=g) for x in new],
                "advantages": [torch.full((r,), float(torch.randn(1, generator=g) - 0.15)) for r in responses],
                "masks": [(torch.rand(r, generator=g) < 0.9).float() for r in responses],
            }
        )
    return found


def tokens_of(step: int, num_data_ranks: int, per_token: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return ratios, advantages and weights of an update's tokens on all ranks."""
    ratios, advantages, weights = [], [], []
    for data_rank in range(num_data_ranks):
        for mb in micro_batches(step, data_rank):
            for new, old, advantage, mask in zip(mb["new"], mb["old"], mb["advantages"], mb["masks"], strict=True):
                kept = mask.bool()
                ratios.append((new - old).exp()[kept])
                advantages.append(advantage[kept])
                weights.append(torch.full((int(kept.sum()),), 1.0 if per_token else 1 / float(mask.sum())))
    return torch.cat(ratios), torch.cat(advantages), torch.cat(weights)


def main() -> None:
    global NUM_ALL_REDUCES
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout")
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--per-token", action="store_true")
    parser.add_argument("--record", type=Path)
    o = parser.parse_args()
    sys.path.insert(0, o.checkout)
    torch._dynamo.config.disable = True
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from megatron.core import mpu

    mpu.initialize_model_parallel(o.tp, o.pp, context_parallel_size=o.cp)
    from slime.backends.megatron_utils import cp_utils
    from slime.backends.megatron_utils.loss import loss_function

    from bapo_megatron.plugins import slime as plugin

    args, paths = host_args(o.per_token), plugin.PATHS
    is_last, data_rank = mpu.is_pipeline_last_stage(ignore_virtual=True), mpu.get_data_parallel_rank()
    paths.before_train_step(args, 0, 0, None, None, None)
    search = paths.search
    assert search is not None
    sum_over_ranks = search.sum_over_ranks

    def counted(table: Tensor) -> Tensor:
        global NUM_ALL_REDUCES
        NUM_ALL_REDUCES += 1
        return sum_over_ranks(table)

    search.sum_over_ranks = counted
    want = (search.config.low.start, search.config.high.start)
    num_bounds = num_losses = num_metrics = 0
    recorded, seen = [], []
    for step in range(NUM_UPDATES):
        if step:
            paths.before_train_step(args, 0, step, None, None, None)
        bounds = search.bounds
        seen.append((bounds.low, bounds.high))
        if not is_last:
            continue
        num_bounds += seen[-1] == want
        want = literal_bounds(tokens_of(step, mpu.get_data_parallel_world_size(), o.per_token), search.config)
        for mb in micro_batches(step, data_rank):
            totals = [len(t) for t in mb["tokens"]]

            def local(values: list[Tensor], mb: Any = mb, totals: Any = totals) -> list[Tensor]:
                if o.cp == 1:
                    return values
                parts = zip(values, totals, mb["responses"], strict=True)
                return [cp_utils.slice_log_prob_with_cp(x, total, response) for x, total, response in parts]

            logits = mb["logits"] if o.cp == 1 else [cp_utils.slice_with_cp(x, 0.0) for x in mb["logits"]]
            full = torch.cat(logits)[None].chunk(o.tp, dim=-1)[mpu.get_tensor_model_parallel_rank()]
            full = full.contiguous().requires_grad_()
            batch = {
                "unconcat_tokens": mb["tokens"],
                "total_lengths": totals,
                "response_lengths": mb["responses"],
                "loss_masks": mb["masks"],
                "rollout_mask_sums": torch.stack([mask.sum() for mask in mb["masks"]]),
                "advantages": local(mb["advantages"]),
                "rollout_log_probs": local(mb["old"]),
                "log_probs": None,
            }
            ours, _, log = loss_function(args, batch, NUM_MICRO_BATCHES, 6, full)
            at_bounds = {"loss_type": "policy_loss", "eps_clip": 1 - bounds.low, "eps_clip_high": bounds.high - 1}
            builtin = Namespace(**{**vars(args), **at_bounds})
            theirs, _, _ = loss_function(builtin, batch, NUM_MICRO_BATCHES, 6, full)
            gradients = [torch.autograd.grad(loss, full)[0] for loss in (ours, theirs)]
            num_losses += torch.allclose(ours, theirs, rtol=1e-6) and torch.allclose(*gradients, rtol=1e-5, atol=1e-8)
            values = dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))
            num_metrics += abs(values["bapo_high"] / values["bapo_low"] - bounds.high / bounds.low) < 1e-5
            record = {name: batch[name] for name in ("advantages", "rollout_log_probs", "loss_masks")}
            recorded.append(as_lists({"step": step, "bounds": seen[-1], "log_probs": mb["new"], **record}))
            recorded[-1]["pg_loss"] = values["pg_loss"]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (is_last, num_bounds, num_losses, num_metrics, NUM_ALL_REDUCES, seen))
    if dist.get_rank() == 0:
        print(vars(o), every)
        with_loss = [result for result in every if result[0]]
        size = NUM_UPDATES * NUM_MICRO_BATCHES
        assert all(result[1:5] == (NUM_UPDATES, size, size, NUM_UPDATES - 1) for result in with_loss)
        assert all(result[5] == with_loss[0][5] for result in with_loss), "the same bounds on all ranks"
        assert len(set(with_loss[0][5])) > 1
        if o.record:
            o.record.write_text(json.dumps({"args": vars(args), "micro_batches": recorded}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
