"""BAPO in TRL: `BAPOTrainer` takes the place of `GRPOTrainer`.

    trainer = BAPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(steps_per_generation=4, ...), bapo={"rho0": 0.5})

TRL computes an update's log-probs and then reads `epsilon_low` and `epsilon_high` for its loss. The trainer searches in
between and sets them, so loss and metrics are still TRL's own. Scopes:

    exact      the ratios of the update itself: without gradient accumulation, from the forward pass that happens
               anyway; with it, from one more forward pass of each micro-batch, without gradient
    lagged     the ratios of the previous update, from its own forward passes
    smoothed   the ratios of several earlier updates
    fixed      no search

Each search makes one all-reduce of a small table per update.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from bapo_megatron.algorithms.bound_search import BoundSearch
from bapo_megatron.algorithms.clip_bounds import empty_table
from bapo_megatron.algorithms.losses import importance_ratio
from bapo_megatron.plugins.host import Host, num_missing

TRL = Host(
    "TRL",
    "trl",
    ("1.16",),
    "GRPOConfig with loss_type dapo, dr_grpo, grpo or bnpo, importance_sampling_level token, and several updates of "
    "each generation batch; bapo scope exact, lagged, smoothed or fixed",
)
_FITTING = {
    "loss_type": ("dapo", "dr_grpo", "grpo", "bnpo"),
    "importance_sampling_level": ("token",),
    "off_policy_mask_threshold": (None,),
    "top_entropy_quantile": (1.0,),
    "use_liger_kernel": (False,),
}
_STATE_FILE = "bapo_state.json"
_SCORED_INPUTS = (  # inputs of `_get_per_token_logps_and_entropies`, besides the tokens
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class BAPOTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose clip bounds BAPO's search finds before each update.

    Args:
        bapo: keys of [bapo] (`bapo help settings`), such as {"rho0": 0.45, "scope": "lagged"}. The default scope is
            exact.

    Raises:
        UserError: TRL's version, or a setting, does not fit.
    """

    def __init__(self, *args: Any, bapo: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if problems := TRL.untried() + TRL.missing(
            GRPOTrainer, "_compute_loss", "_get_per_token_logps_and_entropies", "_prepare_inputs"
        ):
            raise TRL.refusal(problems)
        config = TRL.settings(bapo or {}, "exact", "lagged", "smoothed", "fixed")
        super().__init__(*args, **kwargs)
        problems = self._unfit()
        if config.scope == "exact" and self._updates_of_a_batch % 1:
            problems.append(
                'scope="exact" needs gradient_accumulation_steps to divide steps_per_generation x '
                'num_iterations; choose such a number, or scope="lagged"'
            )
        if problems:
            raise TRL.refusal(problems)
        self.bound_search = BoundSearch(config, self._sum_over_ranks)
        self._inputs: dict[str, Any] | None = None  # inputs of the current forward pass, in training
        self._is_window_open = False  # the update has had a micro-batch

    @property
    def _updates_of_a_batch(self) -> float:
        steps = self.args.steps_per_generation * self.args.num_iterations
        return steps / self.args.gradient_accumulation_steps

    def _unfit(self) -> list[str]:
        problems = [
            f"{name}={value!r} does not fit, choose from {', '.join(map(repr, allowed))}"
            for name, allowed in _FITTING.items()
            if (value := getattr(self.args, name, allowed[0])) not in allowed
        ]
        if self._updates_of_a_batch <= 1:
            problems.append(
                "each batch is trained once, right after it was sampled, so every ratio is 1 and no bound acts; "
                f"set steps_per_generation (now {self.args.steps_per_generation}) or num_iterations so that "
                "steps_per_generation x num_iterations is above gradient_accumulation_steps "
                f"({self.args.gradient_accumulation_steps})"
            )
        return problems

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        if not self._is_window_open and self.bound_search.config.looks_back:
            self.bound_search.search_past()
        elif not self._is_window_open and self._scores_ahead:
            self.bound_search.search(self._table_of_window(model))
        self._inputs = inputs
        loss = super()._compute_loss(model, inputs)  # reads both epsilons after the log-probs
        self._inputs = None
        self._is_window_open = not self.accelerator.sync_gradients
        if self.accelerator.sync_gradients:
            if self.bound_search.config.looks_back:
                self.bound_search.finish_update()
            for name, value in self.bound_search.metrics().items():
                self._metrics["train"][name].append(value)
        return loss

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._inputs is None:
            return found
        search = self.bound_search
        if search.config.looks_back:
            search.add(self._table(self._inputs, found[0]))
        elif search.config.scope == "exact" and not self._scores_ahead:
            search.search(self._table(self._inputs, found[0]))
        self.epsilon_low, self.epsilon_high = 1 - search.bounds.low, search.bounds.high - 1
        return found

    @property
    def _scores_ahead(self) -> bool:
        return self.bound_search.config.scope == "exact" and self.current_gradient_accumulation_steps > 1

    @torch.no_grad()
    def _table_of_window(self, model: Any) -> Tensor:
        """Score the micro-batches of the coming update, and tabulate them."""
        table = empty_table(self.bound_search.config)
        for k in range(self.current_gradient_accumulation_steps):
            inputs = self._buffered_inputs[(self._step + k) % self.args.steps_per_generation]
            log_probs, *_ = super()._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].size(1),
                **{name: inputs[name] for name in _SCORED_INPUTS if name in inputs},
            )
            table += self._table(inputs, log_probs)
        return table

    @torch.no_grad()
    def _table(self, inputs: dict[str, Any], log_probs: Tensor) -> Tensor:
        """Tabulate one of this rank's micro-batches [B, T], each token with the weight that TRL's loss gives it."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        old = inputs.get("old_per_token_logps")
        old = log_probs if old is None else old
        sampled = inputs.get("sampling_per_token_logps", old)
        if self.bound_search.config.token_weight == "rollout_prob":
            TRL.require_logprobs("sampling_per_token_logps", float(num_missing(sampled, mask)))
        weights = torch.ones_like(log_probs)
        if self.loss_type == "grpo":  # each sequence's mean over tokens, averaged over sequences
            weights = weights / mask.sum(-1, keepdim=True).clamp(min=1)
        elif self.loss_type == "bnpo":  # the mean over the tokens of a micro-batch
            weights = weights / mask.sum().clamp(min=1)
        if "importance_sampling_ratio" in inputs:  # vLLM's truncated importance weights
            weights = weights * inputs["importance_sampling_ratio"]
        advantages = inputs["advantages"]
        advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(log_probs)
        ratio = importance_ratio(log_probs, old, mask.bool())
        return self.bound_search.tabulate(ratio, advantages, mask.bool(), sampled, weights)

    def _sum_over_ranks(self, table: Tensor) -> Tensor:
        return self.accelerator.reduce(table.to(self.accelerator.device), reduction="sum").cpu()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / _STATE_FILE).write_text(json.dumps(self.bound_search.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / _STATE_FILE).exists():
            self.bound_search.load_state_dict(json.loads(path.read_text()))
