"""BAPO in Megatron-LM's train_rl.py: an entry script that wraps its `forward_step`. From the root of a checkout:

    BAPO='{"rho0": 0.5, "scope": "lagged"}' torchrun ... -m bapo_megatron.plugins.megatron_lm ARGUMENTS_OF_TRAIN_RL

train_rl.py has no hook for a loss. `forward_step` returns the loss function as a partial that holds the ratios and the
mask, and it reads both clamps from Megatron's arguments when called. The wrapper reads ratios and mask by name, looks
at the batch on its way in, and sets the clamps at an update's first micro-batch. It refuses versions in which any of
this is different. Scopes: lagged, smoothed and fixed, with one all-reduce per update.
"""

import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithms.bound_search import BoundSearch
from bapo_megatron.errors import UserError, escaped
from bapo_megatron.plugins.host import Host, num_missing
from bapo_megatron.plugins.ranks import has_loss, sum_over_data_ranks

MEGATRON_LM = Host(
    "Megatron-LM",
    "megatron.core",
    ("0.20",),
    "train_rl.py without --rl-use-sequence-packing, with --grpo-iterations above 1 or several updates of each rollout; "
    "bapo scope lagged, smoothed or fixed",
)
_CLAMPS = ("grpo_clamp_eps_lower", "grpo_clamp_eps_upper")
_NUM_FIELDS = 7  # fields of an unpacked batch: advantages second, old log-probs third, the engine's log-probs last


class _Peek:
    """An iterator that passes batches through, and keeps the last one."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.last: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.last = next(self.batches)
        return self.last


class BAPOForwardStep:
    """A `forward_step` that counts tokens, and sets the clamps at the first micro-batch of an update.

    Args:
        forward_step: train_rl.py's own.
        get_args: returns Megatron's arguments.
        bapo: keys of [bapo]. The default scope is lagged.
    """

    def __init__(
        self, forward_step: Callable[..., tuple[Any, Any]], get_args: Callable[[], Any], bapo: dict[str, Any]
    ) -> None:
        config = MEGATRON_LM.settings(bapo, "lagged", "smoothed", "fixed")
        if problems := MEGATRON_LM.untried():
            raise MEGATRON_LM.refusal(problems)
        self.search = BoundSearch(config, sum_over_data_ranks)
        self._forward_step, self._get_args = forward_step, get_args
        self._iteration: int | None = None

    def __call__(self, data_iterator: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        settings = self._get_args()
        if self._iteration is None:
            self._check(settings)
        if settings.curr_iteration != self._iteration:  # the first micro-batch of an update
            self._begin_update(settings)
        peek = _Peek(data_iterator)
        output, loss_func = self._forward_step(peek, model, *args, **kwargs)
        if self.search.config.looks_back and has_loss():
            self.search.add(self._table(settings, peek.last, loss_func))
        return output, loss_func

    def _check(self, settings: Any) -> None:
        problems = MEGATRON_LM.missing(settings, "curr_iteration", *_CLAMPS)
        if getattr(settings, "rl_use_sequence_packing", False):
            problems.append("--rl-use-sequence-packing does not fit, as bins have not been tried")
        iterations = getattr(settings, "grpo_iterations", None)
        groups: list[Any] = [getattr(settings, name, None) for name in ("grpo_prompts_per_step", "grpo_group_size")]
        update = getattr(settings, "global_batch_size", None)
        if iterations == 1 and None not in (*groups, update) and groups[0] * groups[1] <= update:
            problems.append(
                "each rollout is trained in one update, right after its log-probs were computed, so every ratio is "
                f"1 and no bound acts; set --grpo-iterations 2, or --global-batch-size below {update}"
            )
        if problems:
            raise MEGATRON_LM.refusal(problems)

    def _begin_update(self, settings: Any) -> None:
        if self._iteration is not None and self.search.config.looks_back and has_loss():
            self.search.finish_update()
            self.search.search_past()
        self._iteration = settings.curr_iteration
        bounds = self.search.bounds
        settings.grpo_clamp_eps_lower, settings.grpo_clamp_eps_upper = 1 - bounds.low, bounds.high - 1

    @torch.no_grad()
    def _table(self, settings: Any, batch: Any, loss_func: Any) -> Tensor:
        """Tabulate a micro-batch [B, T - 1] from the batch and the loss function's arguments."""
        given = _named_arguments(loss_func)
        if not {"loss_mask", "ratios"} <= given.keys() or len(batch) != _NUM_FIELDS:
            raise MEGATRON_LM.refusal(["train_rl.py's batch or loss function differs from the versions tried"])
        mask, ratios = given["loss_mask"].bool(), given["ratios"].detach()
        _, advantages, old, *_, sampled = batch
        advantages = advantages.to(ratios).view(-1, 1).expand_as(ratios)
        weights = None
        if settings.rl_inference_logprobs_is_correction:
            old, sampled = old.to(ratios), sampled.to(ratios)
            MEGATRON_LM.require_logprobs("inference_logprobs", float(num_missing(sampled, mask)))
            weights = (old - sampled).exp()
            if settings.rl_importance_sampling_truncation_coef is not None:
                weights = weights.clamp(max=settings.rl_importance_sampling_truncation_coef)
        return self.search.tabulate(ratios, advantages, mask, old, weights)


def _named_arguments(loss_func: Any) -> dict[str, Any]:
    """Return the arguments that a partial holds, by parameter name."""
    if not isinstance(loss_func, partial):
        return {}
    return dict(zip(inspect.signature(loss_func.func).parameters, loss_func.args, strict=False)) | loss_func.keywords


def main() -> None:
    """Run the current folder's train_rl.py with a wrapped `forward_step`."""
    if not Path("train_rl.py").is_file():
        raise MEGATRON_LM.refusal(["the current folder has no train_rl.py; start from the root of a checkout"])
    sys.path.insert(0, str(Path.cwd()))
    import megatron.core  # noqa: F401  (has the version)
    import megatron.training as training

    if problems := MEGATRON_LM.missing(training, "pretrain", "get_args"):
        raise MEGATRON_LM.refusal(problems)
    pretrain, bapo = training.pretrain, json.loads(os.environ.get("BAPO", "{}"))

    def pretrain_with_bapo(config: Any, datasets: Any, kind: Any, forward_step: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = BAPOForwardStep(forward_step, training.get_args, bapo)
        return pretrain(config, datasets, kind, wrapped, *args, **kwargs)

    training.pretrain = pretrain_with_bapo
    runpy.run_path("train_rl.py", run_name="__main__")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bapo: {escaped(str(error))}")
