"""Replies in the client of an engine: decoded, checked and turned into samples, against plain Python.

    python -m benchmarks.replies [--quick]

The bytes are what SGLang answers to /generate with log-probs. The plain way, with json and loops over tokens, is the
oracle of tests/unit/test_replies.py. Both must return the same samples.

The last rows have the experts of a mixture in addition, as for `model.replay_routes`; the plain way reads these alone,
with Python's base64, and sorts them to find an expert that is named twice. Times are CPU seconds.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapo_megatron.engines.base import GenerateRequest, GenerateResult
from bapo_megatron.engines.replies import REPLIES, decode, parse_reply
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.hf.streams import routes
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.types import Prompt, Sample, Segment
from benchmarks.side_by_side import Rows, main, same, take_turns
from tests.unit.reply_meaning import meaning

PLAIN = "json and loops over tokens"
SORTED = "json, base64 and a sort"
VOCAB_SIZE = 151936
STREAM = routes(model_shape(KNOWN_MODELS["Qwen3-30B-A3B"]))
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


def routed(num_replies: int, num_tokens: int) -> tuple[list[GenerateRequest], bytes]:
    """Return a call as above, of a mixture, whose replies have the experts of prompts and responses."""
    requests, raw = call(num_replies, num_tokens)
    rng, replies = np.random.default_rng(1), json.loads(raw)
    for reply in replies:
        num_rows = len(PROMPT.token_ids) - 1 + num_tokens
        scores = rng.random((num_rows, *STREAM.shape[:1], 128), np.float32)
        experts = scores.argpartition(8, axis=-1)[..., :8].astype("<i4")
        reply["meta_info"]["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    return [replace(q, streams=(STREAM,)) for q in requests], json.dumps(replies, separators=(",", ":")).encode()


def our_routes(raw: bytes, requests: Sequence[GenerateRequest]) -> tuple[Tensor, ...]:
    replies: Any = decode(raw, REPLIES)
    results = (parse_reply(r, q, VOCAB_SIZE, own_routes=True) for r, q in zip(replies, requests, strict=True))
    return tuple(torch.from_numpy(result.rows[STREAM].copy()) for result in results)


def plain_routes(raw: bytes) -> tuple[Tensor, ...]:
    found = []
    for reply in json.loads(raw):
        data = base64.b64decode(reply["meta_info"]["routed_experts"], validate=True)
        experts = np.frombuffer(data, "<i4").reshape(-1, *STREAM.shape)
        ordered = np.sort(experts, axis=-1)
        assert (experts >= 0).all()
        assert (experts < 128).all()
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
        found.append(torch.from_numpy(experts.astype(np.uint8)))
    return tuple(found)


def rows(quick: bool) -> Rows:
    """Compare short and long responses."""
    shapes = ((64, 64), (4, 8192)) if quick else ((512, 64), (64, 1024), (32, 8192), (8, 32768))
    for num_replies, num_tokens in shapes:
        requests, raw = call(num_replies, num_tokens)
        ways = {"ours": partial(ours, raw, requests), PLAIN: partial(plain, raw, requests)}
        turns = take_turns(ways, 5 if quick else 15, agree=same())
        yield turns.row(f"{num_replies} replies of {num_tokens} tokens", PLAIN)
    requests, raw = routed(2, 256 if quick else 2048)
    ways_of_routes = {"ours": partial(our_routes, raw, requests), SORTED: partial(plain_routes, raw)}
    num_tokens = requests[0].max_new_tokens
    turns = take_turns(ways_of_routes, 5 if quick else 15, agree=same())
    yield turns.row(f"2 replies of {num_tokens} tokens, each with {' x '.join(map(str, STREAM.shape))} experts", SORTED)


if __name__ == "__main__":
    main(__doc__, rows)
