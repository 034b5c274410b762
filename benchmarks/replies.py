"""Replies through the client of an engine: decoded, checked and handed over as trajectories, against plain Python.

    python -m benchmarks.replies [--turns 5]

The bytes are what SGLang answers to /generate with log-probs. The plain way, json and loops over tokens, is the oracle
of tests/unit/test_replies.py. Both take turns; the results are compared.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.http import _REPLIES, _decoded, parse_reply
from bapo_megatron.types import Prompt, Segment, Trajectory

sys.path.append(str(Path(__file__).parents[1] / "tests" / "unit"))

from plain_reply import plain_parse

VOCAB_SIZE = 151936
PROMPT = Prompt(0, (1, 2, 3), "", "", "random")


def call(num_replies: int, num_tokens: int) -> tuple[list[GenerateRequest], bytes]:
    """Return the requests of one call and the body of its reply: two weight versions in each response."""
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


def handed_over(result: GenerateResult) -> Trajectory:
    segments = [
        Segment(s.version, 0, result.token_ids[s.start : s.end], result.behaviour_logprobs[s.start : s.end])
        for s in result.spans
    ]
    return Trajectory("0.0", PROMPT).extended(segments, "stop")


def plain(raw: bytes, requests: Sequence[GenerateRequest]) -> list[Trajectory]:
    replies = json.loads(raw)
    return [handed_over(plain_parse(r, q, VOCAB_SIZE)) for r, q in zip(replies, requests, strict=True)]


def ours(raw: bytes, requests: Sequence[GenerateRequest]) -> list[Trajectory]:
    replies: Any = _decoded(raw, _REPLIES)
    return [handed_over(parse_reply(r, q, VOCAB_SIZE)) for r, q in zip(replies, requests, strict=True)]


def seconds(
    way: Callable[[bytes, Sequence[GenerateRequest]], object], raw: bytes, requests: Sequence[GenerateRequest]
) -> float:
    start = time.thread_time()
    way(raw, requests)
    return time.thread_time() - start


def main() -> None:
    """Print a table of tokens per CPU second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    print("| replies x tokens | plain, tokens/s | ours, tokens/s | ours / plain |\n|---|---|---|---|")
    for num_replies, num_tokens in ((512, 64), (64, 1024), (32, 8192), (8, 32768)):
        requests, raw = call(num_replies, num_tokens)
        assert ours(raw, requests) == plain(raw, requests)
        times = [(seconds(plain, raw, requests), seconds(ours, raw, requests)) for _ in range(turns)]
        rates = [num_replies * num_tokens / statistics.median(column) for column in zip(*times, strict=True)]
        factors = sorted(old / new for old, new in times)
        factor = f"{statistics.median(factors):.1f} ({factors[0]:.1f} to {factors[-1]:.1f})"
        print(f"| {num_replies} x {num_tokens} | {rates[0]:,.0f} | {rates[1]:,.0f} | {factor} |", flush=True)


if __name__ == "__main__":
    main()
