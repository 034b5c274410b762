"""The state of rollouts on its way through a checkpoint, without a disk."""

import json
from typing import Any

from bapo_megatron.checkpoint.arrays import attach, detached


def through_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint's JSON and arrays make of a state."""
    plain, arrays = detached(state)
    plain = json.loads(json.dumps(plain))
    attach(plain, arrays)
    return plain
