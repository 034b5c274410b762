"""Trajectories kept for the reader: one object a line in `samples.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bapo_megatron.types import Trajectory


def sample_record(step: int, trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """What `samples.jsonl` keeps of a trained response; `decode` is the tokenizer's, special tokens included.

    Segments are decoded one by one, so a character whose bytes were split over two of them shows as a replacement
    character there; `response` is decoded whole.
    """
    return {
        "step": step,
        "sample_id": trajectory.sample_id,
        "source": trajectory.prompt.source,
        "prompt": trajectory.prompt.text,
        "answer": trajectory.prompt.answer,
        "response": decode(trajectory.response_ids),
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        "num_tokens": trajectory.num_response_tokens,
        "segments": [
            {
                "version": segment.version,
                "step": segment.step,
                "num_tokens": len(segment.token_ids),
                "text": decode(segment.token_ids),
            }
            for segment in trajectory.segments
        ],
    }
