"""Groups keep every bit on their way through JSON, and older files are read."""

import json

from bapo_megatron.types import Group, Prompt, Segment, Trajectory

PROMPT = Prompt(7, (1, 2), "3+5=", {"answer": 8}, "chains")
GROUP = Group(
    PROMPT,
    (
        Trajectory("7.0", PROMPT, (Segment(4, 2, (5, 6), (-0.1, -1e-17)), Segment(5, 3, (9,), (-2.5,))), "stop", 1.0),
        Trajectory("7.1", PROMPT),
    ),
)


def test_a_group_comes_back_from_json_bit_for_bit() -> None:
    assert Group.from_json(json.loads(json.dumps(GROUP.to_json()))) == GROUP


def test_segments_of_older_files_name_their_log_probs_otherwise() -> None:
    value = GROUP.to_json()
    for trajectory in value["trajectories"]:
        for segment in trajectory["segments"]:
            segment["logprobs"] = segment.pop("behaviour_logprobs")
    assert Group.from_json(value) == GROUP
