"""Functions and objects at dotted paths."""

from collections.abc import Callable, Iterator

from bapo_megatron.config.advantages import ADVANTAGE, advantage_function
from bapo_megatron.config.annotators import own_annotators
from bapo_megatron.config.base import Violation
from bapo_megatron.config.dotted import KEEP_GROUP
from bapo_megatron.config.engines import check_engine
from bapo_megatron.config.families import own_family
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError


def check_functions(config: Config) -> Iterator[Violation]:
    """Load the functions at dotted paths, except judges: preflight/inputs.py loads them in a separate process."""
    advantage, rollout, loss = config.advantage.kind, config.rollout, config.loss
    try_to: dict[str, Callable[[], object]] = {
        "rollout.engine": lambda: check_engine(rollout.engine),
        "model.family": lambda: own_family(config.model.family),
    }
    if loss.name not in LOSSES:
        try_to["loss.name loss.options"] = lambda: (loss.function_options, loss.rule)
    if advantage not in ADVANTAGE.names:
        try_to["advantage.kind"] = lambda: advantage_function(advantage)
    if rollout.keep_group not in KEEP_GROUP.names:
        try_to["rollout.keep_group"] = lambda: KEEP_GROUP.load(rollout.keep_group)
    if rollout.annotators:
        try_to["rollout.annotators"] = lambda: own_annotators(config, ())
    for settings, load in try_to.items():
        try:
            load()
        except UserError as error:
            yield Violation(tuple(settings.split()), str(error))
