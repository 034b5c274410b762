"""The settings of `bapo plan --simulate KEY=VALUE ...`."""

import json
import tomllib
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, ValidationError

from bapo_megatron.config.base import Count, NonNegative, PathText, Positive, Section, Whole
from bapo_megatron.config.wording import expected, shown
from bapo_megatron.errors import ConfigError, closest, did_you_mean, escaped

_Times = Annotated[float, Field(ge=0, le=10**9)]


class Simulation(Section):
    """Assumptions of a simulation; the plan has none of them. A run does not read these settings."""

    steps: Count = 20
    """Steps that are counted."""
    warmup_steps: Whole = 5
    """Steps before them, in which the servers fill up."""
    seed: Whole = 0
    """Seed of random lengths and times."""
    spread: float = Field(0.9, ge=0, le=4)
    """Standard deviation of the logarithm of a response's length; --response-tokens is its mean."""
    lengths_from: PathText | None = None
    """`rollouts` folder of a run with rollout.record=true: its lengths, group by group, in place of random ones."""
    decode_ms: tuple[tuple[Count, Positive], ...] = ()
    """Measured: [[responses, ms], ...], the time of a decode step of one server. Unset: the plan's."""
    prefill_us: NonNegative | None = None
    """Time in which a server prefills one token. Unset: matrix products at the plan's share of the peak."""
    train_s: Positive | None = None
    """Training time of a step whose responses have the mean length. Unset: the plan's."""
    push_s: NonNegative | None = None
    """Time of a weight sync, during which the servers pause. Unset: the plan's."""
    turns: Count = 1
    """Turns of a sample; an environment answers between them."""
    answer_tokens: Count = 64
    """Tokens of an environment's answer."""
    wait_s: NonNegative = 0.0
    """Mean time of the judge, or of an environment's answer."""
    wait_spread: float = Field(0.5, ge=0, le=4)
    """Standard deviation of its logarithm."""
    kept_share: float = Field(1.0, gt=0, le=1)
    """Share of the judged groups that rollout.keep_group keeps."""
    reply_us: NonNegative | None = None
    """Trainer rank 0's CPU time for each token that a server returns. Unset: measured, with the routes of experts."""
    down: tuple[tuple[Whole, _Times, Positive], ...] = ()
    """[[server, second, seconds], ...]: a server that ends then, and is back so much later; at second 0, it is late."""
    usd_per_gpu_hour: Positive | None = None
    """Price of a GPU for an hour. Unset: no costs are printed."""
    slices: Count | None = None
    """Simulate one of this many equal parts of servers, prompts and trainer. Unset: as many as keep it short."""


def read_settings(texts: Sequence[str]) -> Simulation:
    """Return the settings of a command line.

    Raises:
        ConfigError: one line for each that is not a setting or has a wrong value.
    """
    given: dict[str, object] = {}
    found: list[str] = []
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in Simulation.model_fields:
            near = did_you_mean(*closest(name, Simulation.model_fields))
            advice = near or f"its settings are {', '.join(Simulation.model_fields)}; other settings come before it"
            found.append(f"--simulate {escaped(text)}: not KEY=VALUE with a setting of the simulation; {advice}")
            continue
        try:
            given[name] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            given[name] = value
    try:
        settings = Simulation.model_validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError as error:
        for one in error.errors():
            cause = one.get("ctx", {}).get("error")  # a validator's, whose text follows the name
            what = f" {cause}" if cause else f"{expected(dict(one))}, got {shown(one['input'])}"
            found.append(f"--simulate {'.'.join(map(str, one['loc']))}{what}")
    if found:
        raise ConfigError("\n".join(found))
    return settings
