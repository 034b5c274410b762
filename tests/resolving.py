"""Runs whose model is only a shape."""

from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.resolved import Resolved, resolve


def shaped(config: Config, shape: ModelShape) -> Resolved:
    """Resolve a run whose model has this shape, and no config.json."""
    run = resolve(config, {})
    vars(run.model)["shape"] = shape  # where `ModelFacts.shape` keeps it
    return run
