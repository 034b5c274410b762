"""Train with `BAPOTrainer` and check each micro-batch against plain formulas; runs in an environment that holds TRL.

usage: trl_run.py OUT.json, or torchrun --nproc_per_node 2 trl_run.py OUT.json
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import bapo_megatron
from bapo_megatron.errors import UserError
from bapo_megatron.plugins.trl import BAPOTrainer

MODEL = Path(bapo_megatron.__file__).parent / "assets" / "demo-model"
RHO0, NUM_UPDATES = 0.55, 5
ALONE = [  # scope, accumulation, loss_type
    ("exact", 1, "dapo"),
    ("exact", 2, "grpo"),
    ("exact", 2, "bnpo"),
    ("lagged", 2, "dapo"),
    ("smoothed", 1, "dr_grpo"),
]
TOGETHER = [("exact", 2, "dapo"), ("exact", 1, "grpo"), ("lagged", 2, "dapo"), ("smoothed", 1, "dapo")]


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(c.strip().startswith(a)) + 0.1 * (len(c) % 5) for c, a in zip(completions, answer, strict=True)]


class Checked(BAPOTrainer):
    """A trainer that keeps each micro-batch with its loss and gradient, next to those by formula."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[dict[str, Any]] = []
        self.num_forwards = self.num_all_reduces = 0
        reduce = self.accelerator.reduce

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.num_all_reduces += tensor.dtype == torch.float64
            return reduce(tensor, *args, **kwargs)

        self.accelerator.reduce = counted

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.last = found[0]
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        mask, new, bounds = inputs["completion_mask"].bool(), self.last, self.bound_search.bounds
        old = inputs.get("old_per_token_logps")
        old = new.detach() if old is None else old
        advantages = inputs["advantages"][:, None].expand_as(new)
        ratio = torch.where(mask, (new - old).exp(), 1.0)
        is_clipped = (advantages > 0) & (ratio > bounds.high) | (advantages < 0) & (ratio < bounds.low)
        bounded = torch.where(is_clipped, ratio.detach().clamp(bounds.low, bounds.high), ratio)
        weight = self.weight(mask, inputs)
        expected = -(weight * bounded * advantages).sum()
        (got,) = torch.autograd.grad(loss, new, retain_graph=True)
        (want,) = torch.autograd.grad(expected, new, retain_graph=True)
        self.seen.append(
            {
                "step": self.state.global_step,
                "bounds": (bounds.low, bounds.high),
                "loss_error": abs(float(loss.detach() - expected.detach())),
                "gradient_error": float((got - want).abs().max() / want.abs().max().clamp(min=1e-12)),
                "tokens": [x[mask].double().tolist() for x in (ratio.detach(), advantages, weight)],
            }
        )
        return loss

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.loaded = self.bound_search.state_dict()

    def weight(self, mask: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Return each token's weight in the loss, by TRL's documentation of its loss types."""
        count = self.current_gradient_accumulation_steps
        if self.loss_type == "grpo":
            return mask / mask.sum(-1, keepdim=True) / mask.shape[0] / count
        if self.loss_type == "bnpo":
            return mask / mask.sum() / count
        if self.loss_type == "dr_grpo":
            return mask / (mask.shape[0] * self.max_completion_length) / count
        per_rank = inputs["num_items_in_batch"] / self.accelerator.num_processes
        return mask / (per_rank * count / self.args.steps_per_generation)


def literal_bounds(updates: list[tuple[float, list[torch.Tensor]]], search: Any) -> tuple[float, float]:
    """Run Algorithm 1, reading every token at every probe; each update has its weight."""
    lows, highs, i, j = search.low.points, search.high.points, 0, 0
    while True:
        positive = negative = 0.0
        for share, (r, a, w) in updates:
            positive += share * float((w * r * a)[(a > 0) & (r < highs[j])].sum())
            negative += share * float((w * r * -a)[(a < 0) & (r > lows[i])].sum())
        if positive / (positive + negative) >= search.rho0 * (1 - 1e-5) or i == len(lows) - 1:
            return lows[i], highs[j]
        i, j = (i, j + 1) if j < len(highs) - 1 else (i + 1, j)


def trainer(scope: str, accumulation: int, loss_type: str, **changes: Any) -> Checked:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": 4 * accumulation,
        "num_generations": 8,
        "max_completion_length": 16,
        "learning_rate": 3e-3,
        "max_steps": NUM_UPDATES,
        "beta": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "loss_type": loss_type,
        "seed": 1,
    }
    return Checked(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**{**settings, **changes}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        bapo={"scope": scope, "rho0": RHO0, "smoothing_updates": 3},
    )


def check(scope: str, accumulation: int, loss_type: str) -> dict[str, Any]:
    """Train, and compare bounds with the plain loop over all ranks, and loss and gradient with the formula."""
    trained = trainer(scope, accumulation, loss_type)
    trained.train()
    every: list[list[dict[str, Any]]] = [trained.seen]
    if dist.is_initialized():
        every = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, trained.seen)
    search = trained.bound_search.config
    decay = {"lagged": 0.0, "smoothed": 1 - 1 / 3}.get(scope, 0.0)
    updates, num_equal, wanted = [], 0, []
    for step in range(NUM_UPDATES):
        micro = [each for seen in every for each in seen if each["step"] == step]
        updates.append([torch.tensor([x for m in micro for x in m["tokens"][i]]).double() for i in range(3)])
        if scope == "exact":
            want = literal_bounds([(1.0, updates[-1])], search)
        elif step == 0:
            want = (search.low.start, search.high.start)
        else:
            want = literal_bounds([(decay ** (step - 1 - past), updates[past]) for past in range(step)], search)
        wanted.append(want)
        num_equal += {m["bounds"] for m in micro} == {want}
    logged = [entry["bapo/high"] for entry in trained.state.log_history if "bapo/high" in entry]
    return {
        "case": [scope, accumulation, loss_type],
        "num_micro_batches": sum(map(len, every)),
        "num_equal_bounds": num_equal,
        "num_bounds": len(set(wanted)),
        "logged": logged == [high for _, high in wanted],
        "all_reduces": trained.num_all_reduces,
        "loss_error": max(m["loss_error"] for seen in every for m in seen),
        "gradient_error": max(m["gradient_error"] for seen in every for m in seen),
    }


def check_resume() -> bool:
    """Check that the tables of earlier updates go through TRL's checkpoint bit for bit."""
    first = trainer("smoothed", 1, "dapo", save_strategy="steps", save_steps=NUM_UPDATES)
    first.train()
    second = trainer("smoothed", 1, "dapo", max_steps=NUM_UPDATES + 1)
    second.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-{NUM_UPDATES}")
    return first.bound_search.state_dict() == second.loaded != {"lagged": None}


def refusals() -> list[str]:
    said = []
    for scope, changes in (
        ("exact", {"loss_type": "cispo", "importance_sampling_level": "sequence"}),
        ("exact", {"steps_per_generation": 1}),
        ("exact", {"gradient_accumulation_steps": 2, "steps_per_generation": 5}),
        ("exact", {"top_entropy_quantile": 0.2}),
        ("microbatch", {}),
    ):
        try:
            trainer(scope, 1, **{"loss_type": "dapo", **changes})
        except UserError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    is_alone = "RANK" not in os.environ
    result: dict[str, Any] = {"cases": [check(*case) for case in (ALONE if is_alone else TOGETHER)]}
    if is_alone:
        result |= {"refusals": refusals(), "resumes": check_resume()}
    if is_alone or dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    if not is_alone:
        dist.destroy_process_group()
