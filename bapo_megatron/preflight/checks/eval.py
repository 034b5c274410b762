"""Checks of evaluation during the run."""

from collections.abc import Iterator

from bapo_megatron.config.base import Violation
from bapo_megatron.preflight.checks.data import check_source
from bapo_megatron.resolved import Resolved

EVALUATES = ("eval.sets", "eval.interval_steps")


def check_eval(run: Resolved) -> Iterator[Violation]:
    """Check the sets of prompts for evaluation during the run."""
    config = run.config
    if config.eval.interval_steps is None:
        return
    for table, one in config.eval_sets.items() if config.eval.sets else ():
        yield from check_source(table, one)
    if config.data.sources and not config.eval.sets:
        yield Violation(
            (*EVALUATES, "data.sources"),
            "eval.interval_steps with data.sources needs eval.sets, which name the prompts to evaluate on",
            "set them, or leave eval.interval_steps out",
        )
    elif config.data.kind.path == "file" and config.eval.path is None and not config.eval.sets:
        yield Violation(
            ("eval.path", *EVALUATES, "data.source", "data.sources"),
            f'eval.interval_steps with data.source="{config.data.source}" needs eval.path, a file of prompts to '
            "evaluate on",
            "set it, or leave eval.interval_steps out",
        )
    elif config.data.has_rows and config.data.kind.path != "file" and not config.eval.sets:
        yield Violation(
            (*EVALUATES, "data.source", "data.sources"),
            f'eval.interval_steps with data.source="{config.data.source}" needs eval.sets, which name the prompts to '
            "evaluate on",
            "set them, or leave eval.interval_steps out",
        )
    if not run.engine.samples:
        yield Violation(
            ("eval.interval_steps", "rollout.engine"),
            f'eval.interval_steps needs engines to ask, and rollout.engine="{config.rollout.engine}" has none',
            'leave it out, or set rollout.engine="embedded"',
        )
