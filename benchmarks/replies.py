"""Replies in the client of an engine: decoded, checked and turned into samples, against plain Python.

    python -m benchmarks.replies [--quick]

The bytes are what SGLang answers to /generate with log-probs. The plain way, with json and loops over tokens, is the
oracle of tests/unit/test_replies.py. Both must return the same samples. Times are CPU seconds.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.replies import REPLIES, decode, parse_reply
from bapo_megatron.types import Prompt, Sample, Segment
from benchmarks.side_by_side import Rows, main, same, take_turns

sys.path.append(str(Path(__file__).parents[1] / "tests" / "unit"))

from reply_meaning import meaning

PLAIN = "json and loops over tokens"
VOCAB_SIZE = 151936
PROMPT = Prompt(0, (1, 2, 3), "", "", "random")


def call(num_replies: int, num_tokens: int) -> tuple[list[GenerateRequest], bytes]:
    """Return the requests of one call and the body of its reply, with two weight versions in each response."""
    rng = np.random.default_rng(0)
    requests, replies = [], []
    for i in range(num_replies):
        ids = rng.integers(VOCAB_SIZE, size=num_tokens).tolist()
        logprobs = (-rng.exponential(0.3, num_tokens)).astype(np.float32).tolist()
        half = num_tokens // 2
        meta = {
            "id": f"r{i}",
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": len(PROMPT.token_ids),
            "cached_tokens": 0,
            "weight_versions": [
                {"version": "3", "start": 0, "end": half},
                {"version": "4", "start": half, "end": num_tokens},
            ],
            "output_token_logprobs": [[x, t, None] for x, t in zip(logprobs, ids, strict=True)],
        }
        replies.append({"text": "", "output_ids": ids, "meta_info": meta})
        requests.append(GenerateRequest(f"r{i}", PROMPT.token_ids, num_tokens, 1.0, (), 0))
    return requests, json.dumps(replies, separators=(",", ":")).encode()


def handed_over(result: GenerateResult) -> Sample:
    segments = [
        Segment.sampled(s.version, 0, result.token_ids[s.start : s.end], result.behaviour_logprobs[s.start : s.end])
        for s in result.spans
    ]
    return Sample.of("0.0", PROMPT).extended(segments, "stop")


def plain(raw: bytes, requests: Sequence[GenerateRequest]) -> list[Sample]:
    replies = json.loads(raw)
    return [handed_over(meaning(r, q, VOCAB_SIZE)) for r, q in zip(replies, requests, strict=True)]


def ours(raw: bytes, requests: Sequence[GenerateRequest]) -> list[Sample]:
    replies: Any = decode(raw, REPLIES)
    return [handed_over(parse_reply(r, q, VOCAB_SIZE)) for r, q in zip(replies, requests, strict=True)]


def rows(quick: bool) -> Rows:
    """Compare short and long responses."""
    shapes = ((64, 64), (4, 8192)) if quick else ((512, 64), (64, 1024), (32, 8192), (8, 32768))
    for num_replies, num_tokens in shapes:
        requests, raw = call(num_replies, num_tokens)
        ways = {"ours": partial(ours, raw, requests), PLAIN: partial(plain, raw, requests)}
        turns = take_turns(ways, 5 if quick else 15, agree=same())
        yield turns.row(f"{num_replies} replies of {num_tokens} tokens", PLAIN)


if __name__ == "__main__":
    main(__doc__, rows)
