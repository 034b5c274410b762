"""Groups as JSON values, exactly: floats keep every bit, tuples come back as tuples."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bapo_megatron.types import Group, Prompt, Segment, Trajectory


def group_to_json(group: Group) -> dict[str, Any]:
    """The prompt once, and each trajectory without it."""
    trajectories = []
    for t in group.trajectories:
        trajectories.append(
            {
                "sample_id": t.sample_id,
                "segments": [asdict(s) for s in t.segments],
                "finish_reason": t.finish_reason,
                "reward": t.reward,
            }
        )
    return {"prompt": asdict(group.prompt), "trajectories": trajectories}


def group_from_json(value: dict[str, Any]) -> Group:
    prompt = Prompt(**{**value["prompt"], "token_ids": tuple(value["prompt"]["token_ids"])})
    return Group(prompt, tuple(_trajectory(prompt, t) for t in value["trajectories"]))


def _trajectory(prompt: Prompt, value: dict[str, Any]) -> Trajectory:
    segments = tuple(
        Segment(s["version"], s["step"], tuple(s["token_ids"]), tuple(s["logprobs"])) for s in value["segments"]
    )
    return Trajectory(value["sample_id"], prompt, segments, value["finish_reason"], value["reward"])
