"""Code shared by all plugins: refusals that name the host, the weights of its reducer, NaN log-probs."""

import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from bapo_megatron.config.schema_loss import PRESETS, ClipBoundConfig
from bapo_megatron.errors import UserError, plural, wrong_fields

_UNTRIED_HOST = "BAPO_UNTRIED_HOST"  # a variable, because hosts start a plugin in processes of their own


@dataclass(frozen=True, slots=True)
class Host:
    """A framework that a plugin runs in.

    Example: Host("TRL", "trl", ("1.16",), 'loss_type="dapo" with scope="exact"')
    """

    name: str
    module: str  # also the distribution's name, if the module has no `__version__`
    tried: tuple[str, ...]  # versions, each as the start of a version: "1.16" stands for 1.16.0 and 1.16.3
    works: str  # what the plugin supports, as the end of a sentence

    @property
    def version(self) -> str | None:
        """The version of the imported module, or otherwise of the distribution; None for a bare checkout."""
        if version := getattr(sys.modules.get(self.module), "__version__", None):
            return str(version)
        try:
            return importlib.metadata.version(self.module)
        except importlib.metadata.PackageNotFoundError:
            return None

    def refusal(self, problems: Sequence[str]) -> UserError:
        """Return one error for all problems: the host, its version, and what works."""
        versions = " and ".join(self.tried)
        what = "; ".join(problems)
        return UserError(
            f"BAPO in {self.name} {self.version or '(version unknown)'}: {what}. "
            f"What works, tried with {self.name} {versions}: {self.works}"
        )

    def untried(self) -> list[str]:
        """Return the problem of an untried version, if the host's version is known and not among those tried.

        With BAPO_UNTRIED_HOST=1, as for a fork, warn instead.
        """
        version = self.version
        if version is None or any(version == t or version.startswith(f"{t}.") for t in self.tried):
            return []
        problem = f"the plugin has not been tried with this version of {self.name}"
        if os.environ.get(_UNTRIED_HOST) != "1":
            return [f"{problem}; set {_UNTRIED_HOST}=1 in the environment of all its processes to try it"]
        warnings.warn(
            f"BAPO in {self.name} {version}: {problem}, and {_UNTRIED_HOST}=1 lets it run; check that bapo/low and "
            "bapo/high move before you trust it",
            stacklevel=2,
        )
        return []

    def missing(self, owner: object, *names: str) -> list[str]:
        """Return the problem of hooks that `owner` does not have, if any."""
        absent = [name for name in names if not hasattr(owner, name)]
        return (
            [f"{getattr(owner, '__name__', owner)} has no {', '.join(absent)}, which the plugin needs"]
            if absent
            else []
        )

    def settings(self, bapo: Mapping[str, Any], *scopes: str) -> ClipBoundConfig:
        """Return [bapo] from its keys; scope is by default the preset's or the first of `scopes`. Raises UserError."""
        scope = PRESETS.get(str(bapo.get("preset")), {}).get("scope", scopes[0])
        try:
            config = ClipBoundConfig.model_validate({"scope": scope, **bapo})
        except ValidationError as error:
            raise self.refusal([wrong_fields(error)]) from None
        if config.scope not in scopes:
            raise self.refusal([f'scope="{config.scope}" is not possible here, choose from {", ".join(scopes)}'])
        return config

    def require_logprobs(self, name: str, num_missing: float) -> None:
        """Raise UserError if trained tokens lack a log-prob: nan stands for those that an engine such as vLLM omits."""
        if num_missing:
            tokens = plural(int(num_missing), "trained token")
            raise self.refusal([f"{name} is nan for {tokens}, which the engine did not score"])


def num_missing(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Count the trained tokens whose log-prob is nan."""
    return (log_probs.isnan() & mask.bool()).sum()


def reducer_weights(reducer: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Return the weight that a host's reducer gives each token of the objective, 0 where masked; shape of `like`.

    The reducer is linear: its gradient is the weight, including mask, denominators and context-parallel slices.
    """
    zeros = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        total = reducer(zeros)
    return torch.autograd.grad(total, zeros)[0] if zeros.numel() else zeros.detach()
