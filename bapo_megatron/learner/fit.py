"""Checks that models fit the layout, and that a reference policy fits the policy."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bapo_megatron.config.base import Violation
from bapo_megatron.config.families import own_family
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import layout_problems, model_shape, unsupported


def check_reference(config: Config, reference: dict[str, Any], policy: dict[str, Any]) -> Iterator[Violation]:
    """Check that the model of `loss.reference_path` can be compared with the policy, and split like it.

    Args:
        reference, policy: their config.json.
    """
    settings, name = ("loss.reference_path", "loss.kl_coef"), f"loss.reference_path={config.loss.reference_path!r}"
    if (size := reference.get("vocab_size")) != policy.get("vocab_size"):
        yield Violation(
            (*settings, "model.path"),
            f"{name} has a vocabulary of {size} tokens, but the policy's has {policy.get('vocab_size')}: log-probs of "
            "the same tokens cannot be compared",
            "set it to a model of the policy's family, or leave it out",
        )
    for violation in check_split(config, reference, "loss.reference_path"):
        yield replace(violation, settings=(*settings, *violation.settings[1:]), problem=f"{name}: {violation.problem}")


def check_split(config: Config, hf_config: dict[str, Any], model: str) -> Iterator[Violation]:
    """Check that the model named by the setting `model` is supported, and can be split over the ranks."""
    p, own = config.parallel, own_family(config.model.family)
    if problems := unsupported(hf_config, own):
        yield from (Violation((model,), problem) for problem in problems)
        return
    shape = model_shape(hf_config, own=own)
    for setting, (problem, remedy) in layout_problems(shape, p.tensor, p.pipeline, p.virtual_pipeline).items():
        yield Violation((f"parallel.{setting}", model), problem, remedy)
