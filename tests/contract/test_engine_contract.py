"""What every rollout engine must do, over its HTTP API and through the client."""

import contextlib
import gzip
import http.client
import json
import re
import select
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bapo_megatron.config.engines import ENGINES
from bapo_megatron.config.schema import RolloutConfig, SyncConfig
from bapo_megatron.engines.base import ALL_MEMORY, GenerateRequest, GenerateResult, Memory, PauseMode, VersionSpan
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.processes import reserved_ports
from bapo_megatron.engines.wire import TensorSpec, plan_buckets
from bapo_megatron.errors import EngineError, RequestRefusedError
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.encoding import prompt_ids
from bapo_megatron.rollout.dispatch import Dispatcher, sample_seed
from bapo_megatron.rollout.teacher import OwnServers, Teacher
from bapo_megatron.sync.broadcast import BroadcastChannel
from bapo_megatron.sync.disk import DiskChannel
from bapo_megatron.tokens import TEACHER_LOGPROBS, TEACHER_VERSIONS, sampler_streams
from bapo_megatron.types import Ended, NeedsEnvironment, NeedsTokens, Prompt, Sample, Segment
from tests.distributed import HANG_S
from tests.rollout_servers import AUTHORIZATION, EOS, VOCAB_SIZE, Servers

PROMPT = [5, 9, 33, 70, 12, 8]
TOLERANCE = 1e-4
T = TypeVar("T")


def reference_logprobs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> Tensor:
    """Return transformers' log-probs of the tempered distribution, float32 [len(output)]."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits_TV / temperature, -1).gather(1, torch.tensor(output)[:, None])[:, 0]


def reference_cut_logprobs(
    model: Any, output: Sequence[int], top_p: float, top_k: int | None, temperature: float
) -> Tensor:
    """Return log-probs after PROMPT of the tempered distribution cut to the likeliest tokens, float32 [len(output)]."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*PROMPT, *output]])).logits[0, len(PROMPT) - 1 : -1].double()
    sorted_TV, order_TV = torch.softmax(logits_TV / temperature, -1).sort(descending=True)
    drop_TV = sorted_TV.cumsum(-1) - sorted_TV > top_p
    drop_TV |= torch.arange(VOCAB_SIZE) >= (top_k or VOCAB_SIZE)
    kept_TV = torch.zeros_like(sorted_TV).scatter_(1, order_TV, sorted_TV.masked_fill(drop_TV, 0))
    kept_TV /= kept_TV.sum(-1, keepdim=True)
    return kept_TV.gather(1, torch.tensor(output)[:, None])[:, 0].log().float()


def assert_cut(servers: Servers, output: Sequence[int], logprobs: Sequence[float], **cut: Any) -> None:
    """Compare log-probs under the cut distribution with transformers (weights "a"); the tokens cut off must matter."""
    expected = reference_cut_logprobs(servers.models["a"], output, **cut)
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)
    whole = reference_logprobs(servers.models["a"], PROMPT, list(output), cut["temperature"])
    assert (expected - whole).mean() > 0.05


def ask(servers: Servers, prompt: list[int] = PROMPT, n: int = 16, **sampling: Any) -> dict[str, Any]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": n, "ignore_eos": True} | sampling}
    status, reply = servers.post("/generate", body | {"return_logprob": True})
    assert status == 200, reply
    return reply


def ask_later(servers: Servers, rid: str, n: int | None = None, **sampling: Any) -> Future[tuple[int, Any]]:
    sampling = {"max_new_tokens": n or servers.num_long, "ignore_eos": True} | sampling
    return servers.post_later(
        "/generate", {"rid": rid, "input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    )


def until_caught(servers: Servers, act: Callable[[], T], count: int = 1) -> tuple[T, list[dict[str, Any]]]:
    """Act on the server while it decodes responses, and end these. If one ended by itself, start all of them again."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        servers.wait_until_idle()
        pending = [ask_later(servers, f"caught-{i}") for i in range(count)]
        servers.wait_until_running(pending)
        found = act()
        servers.loop.run(servers.engine.abort())
        replies = [future.result(HANG_S) for future in pending]
        if all(status == 200 and r["meta_info"]["finish_reason"]["type"] == "abort" for status, r in replies):
            return found, [reply for _, reply in replies]
        servers.loop.run(servers.engine.resume())
    raise AssertionError("no response could be aborted")


def first_tokens(servers: Servers, seeds: range, **sampling: Any) -> list[int]:
    """Return one sampled token per seed."""
    params = [{"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": seed} | sampling for seed in seeds]
    status, replies = servers.post("/generate", {"input_ids": [PROMPT] * len(seeds), "sampling_params": params})
    assert status == 200, replies
    return [reply["output_ids"][0] for reply in replies]


def logprobs_of(reply: dict[str, Any]) -> Tensor:
    triples = reply["meta_info"]["output_token_logprobs"]
    assert [t[1] for t in triples] == reply["output_ids"]
    return torch.tensor([t[0] for t in triples])


def assert_matches(servers: Servers, model: str, reply: dict[str, Any], temperature: float = 1.0) -> None:
    expected = reference_logprobs(servers.models[model], PROMPT, reply["output_ids"], temperature)
    torch.testing.assert_close(logprobs_of(reply), expected, atol=TOLERANCE, rtol=0)


def request(rid: str, seed: int = 0, n: int = 24, tokens: list[int] = PROMPT, **changes: Any) -> GenerateRequest:
    fields = {"temperature": 1.0, "stop_token_ids": (), "seed": seed} | changes
    return GenerateRequest(rid=rid, token_ids=tuple(tokens), max_new_tokens=n, **fields)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_tempered_distribution(servers: Servers, temperature: float) -> None:
    assert_matches(servers, "a", ask(servers, temperature=temperature, n=40), temperature)


@pytest.mark.parametrize(
    "cut",
    [
        {"top_p": 0.6, "top_k": 90, "temperature": 1.0},
        {"top_p": 1.0, "top_k": 4, "temperature": 0.7},
        {"top_p": 0.8, "top_k": 12, "temperature": 1.5},
    ],
    ids=["top_p", "top_k", "both"],
)
def test_behaviour_logprobs_are_those_of_the_cut_distribution(servers: Servers, cut: dict[str, Any]) -> None:
    run, engine = servers.loop.run, servers.engine
    requests = [request(f"cut-{seed}", seed=seed, n=40, **cut) for seed in range(3)]
    results = run(engine.generate_many(requests))
    for result in results:
        assert_cut(servers, result.token_ids, result.behaviour_logprobs, **cut)
    alone = run(engine.generate(replace(requests[0], rid="cut-alone")))
    assert alone.token_ids.tolist() == results[0].token_ids.tolist()
    assert alone.behaviour_logprobs == pytest.approx(results[0].behaviour_logprobs, abs=TOLERANCE)


def test_cut_logprobs_outlast_a_retraction(servers: Servers) -> None:
    cut = {"top_p": 0.8, "top_k": 12, "temperature": 1.0}
    sampling = {"max_new_tokens": servers.num_long, "ignore_eos": True, "sampling_seed": 3} | cut
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "return_sampling_mask": True}
    (pending,) = servers.held(lambda: [servers.post_later("/generate", body)])
    servers.loop.run(servers.engine.pause("retract"))
    servers.loop.run(servers.engine.resume())
    status, reply = pending.result(HANG_S)
    assert status == 200, reply
    assert reply["meta_info"]["num_retractions"] == 1
    assert_cut(servers, reply["output_ids"], reply["meta_info"]["output_token_sampling_logprobs"], **cut)


def test_a_cut_by_top_p_alone_is_answered_or_refused_as_the_kind_of_engine_says(servers: Servers) -> None:
    asking = servers.engine.generate(request("top-p-alone", n=8, top_p=0.5))
    if ENGINES[servers.kind.partition("-")[0]].max_cut_tokens is None:
        result = servers.loop.run(asking)
        assert_cut(servers, result.token_ids, result.behaviour_logprobs, top_p=0.5, top_k=None, temperature=1.0)
        return
    with pytest.raises(RequestRefusedError, match=rf"{servers.url}.*top-p-alone.*top_k"):
        servers.loop.run(asking)


def test_greedy_continuation_equals_transformers(servers: Servers) -> None:
    reply = ask(servers, temperature=0, n=32)
    generated = servers.models["a"].generate(
        torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert reply["output_ids"] == generated[0, len(PROMPT) :].tolist()
    assert_matches(servers, "a", reply)


def test_one_push_updates_both_servers(servers: Servers) -> None:
    version = servers.push("b")
    for engine in servers.engines:
        result: GenerateResult = servers.loop.run(engine.generate(request("after-push", n=32)))
        assert {span.version for span in result.spans} == {version}
        expected = reference_logprobs(servers.models["b"], PROMPT, list(result.token_ids))
        torch.testing.assert_close(torch.tensor(result.behaviour_logprobs), expected, atol=TOLERANCE, rtol=0)
        old = reference_logprobs(servers.models["a"], PROMPT, list(result.token_ids))
        assert (torch.tensor(result.behaviour_logprobs) - old).abs().max() > 0.1, (
            "the two models must differ for this to mean much"
        )


def test_push_reports_what_it_did(servers: Servers) -> None:
    state = servers.weights["b"]
    servers.version += 1
    assert servers.channel is not None
    stats = servers.channel.push(iter(state.items()), servers.version)
    assert stats.num_tensors == len(state)
    assert stats.num_bytes == sum(t.nbytes for t in state.values())
    assert stats.num_buckets > 1
    assert set(stats.seconds) == {"pause", "gather", "broadcast", "verify", "resume"}
    assert 0 < stats.generation_pause_s <= sum(stats.seconds.values())


def test_retracted_requests_go_on_with_the_new_weights(servers: Servers) -> None:
    before = servers.version
    pending = servers.held(lambda: [ask_later(servers, f"retract-{i}") for i in range(3)])
    after = servers.push("b")
    for future in pending:
        status, reply = future.result(HANG_S)
        assert status == 200
        spans = reply["meta_info"]["weight_versions"]
        assert [s["version"] for s in spans] == [str(before), str(after)]
        assert spans[0]["start"] == 0
        assert spans[0]["end"] == spans[1]["start"]
        assert spans[1]["end"] == len(reply["output_ids"]) == servers.num_long
        assert reply["meta_info"]["num_retractions"] == 1
        cut = spans[1]["start"]
        for model, part in (("a", slice(0, cut)), ("b", slice(cut, None))):
            expected = reference_logprobs(servers.models[model], PROMPT, reply["output_ids"])[part]
            torch.testing.assert_close(logprobs_of(reply)[part], expected, atol=TOLERANCE, rtol=0)


def test_in_place_pause_keeps_the_cache(servers: Servers) -> None:
    (pending,) = servers.held(lambda: [ask_later(servers, "in-place")])
    assert servers.post("/flush_cache")[0] == 400
    assert servers.post("/continue_generation", {})[0] == 200
    status, reply = pending.result(HANG_S)
    assert status == 200
    assert reply["meta_info"]["num_retractions"] == 0
    assert_matches(servers, "a", reply)


def test_retract_pause_frees_the_cache_and_changes_nothing(servers: Servers) -> None:
    (pending,) = servers.held(lambda: [ask_later(servers, "paused", temperature=1.0, sampling_seed=3)])
    assert servers.post("/pause_generation", {"mode": "retract"})[0] == 200
    assert servers.post("/flush_cache")[0] == 200
    assert servers.post("/continue_generation", {})[0] == 200
    reply = pending.result(HANG_S)[1]
    assert len(reply["output_ids"]) == servers.num_long
    assert_matches(servers, "a", reply)
    assert reply["output_ids"] == ask(servers, n=servers.num_long, sampling_seed=3)["output_ids"]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_new_requests_wait_while_paused(servers: Servers, mode: str) -> None:
    assert servers.post("/pause_generation", {"mode": mode})[0] == 200
    connection = http.client.HTTPConnection(servers.url.removeprefix("http://"), timeout=HANG_S)
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling})
    with contextlib.closing(connection):
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"} | AUTHORIZATION)
        if servers.kind == "embedded":  # SGLang counts only those that have reached its scheduler
            while servers.get("/v1/loads")["loads"][0]["num_waiting_reqs"] == 0:
                assert not select.select([connection.sock], [], [], 0.01)[0], "it has been answered"
        assert servers.num_running() == 0
        version = servers.push("b")
        reply = json.loads(connection.getresponse().read())
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == [str(version)], "sampled in the pause"


def test_abort_pause_returns_what_there_is(servers: Servers) -> None:
    (status, _), replies = until_caught(servers, lambda: servers.post("/pause_generation", {"mode": "abort"}), 3)
    assert status == 200
    for reply in replies:
        assert 0 < len(reply["output_ids"]) < servers.num_long
        assert_matches(servers, "a", reply)


def test_abort_one_then_all(servers: Servers) -> None:
    run, engine, n = servers.loop.run, servers.engine, servers.num_long

    def begin() -> list[Future[Any]]:
        return [servers.loop.submit(engine.generate(request(rid, n=n))) for rid in ("one", "two")]

    first, second = servers.held(begin)
    run(engine.abort("one"))
    run(engine.resume())
    result = first.result(HANG_S)
    assert result.finish_reason == "abort"
    assert 0 < len(result.token_ids) == len(result.behaviour_logprobs) < n
    assert second.result(HANG_S).finish_reason in ("length", "stop")
    both = servers.held(begin)
    run(engine.abort())
    run(engine.resume())
    for future in both:
        assert future.result(HANG_S).finish_reason == "abort"
        assert 0 < len(future.result().token_ids) < n


def test_abort_needs_the_exact_rid(servers: Servers) -> None:
    run, engine = servers.loop.run, servers.engine
    asked = request("whole-name", n=servers.num_long)
    (pending,) = servers.held(lambda: [servers.loop.submit(engine.generate(asked))])
    run(engine.abort("whole"))
    run(engine.resume())
    assert pending.result(HANG_S).finish_reason in ("length", "stop")


def test_flush_is_refused_while_busy_and_works_when_idle(servers: Servers) -> None:
    (status, message), _ = until_caught(servers, lambda: servers.post("/flush_cache"))
    assert status == 400, message
    deadline = time.monotonic() + HANG_S
    while servers.post("/flush_cache")[0] != 200:  # SGLang becomes idle shortly after its last answer
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_batches_and_samples_come_back_in_order(servers: Servers) -> None:
    prompts = [PROMPT, PROMPT[:2], PROMPT * 3]
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompts, "rid": ["x", "y", "z"], "sampling_params": sampling}
    status, replies = servers.post("/generate", body)
    assert status == 200
    assert [r["meta_info"]["id"] for r in replies] == ["x", "y", "z"]
    assert [r["meta_info"]["prompt_tokens"] for r in replies] == [6, 2, 18]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == ask(servers, prompt, 5, temperature=0)["output_ids"]
    status, replies = servers.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling | {"n": 3}})
    assert (status, len(replies)) == (200, 3)


def test_many_requests_in_one_call_are_each_answered_as_if_asked_alone(servers: Servers) -> None:
    requests = [request(f"many-{i}", seed=i, n=4 + i, temperature=0.8 + 0.1 * i) for i in range(5)]
    results = servers.loop.run(servers.engine.generate_many(requests))
    for asked, result in zip(requests, results, strict=True):
        alone = servers.loop.run(servers.engine.generate(replace(asked, rid=f"{asked.rid}-alone")))
        assert (result.rid, result.token_ids.tolist()) == (asked.rid, alone.token_ids.tolist())
        assert result.behaviour_logprobs == pytest.approx(alone.behaviour_logprobs, abs=TOLERANCE)


def test_more_requests_than_rows_all_finish(servers: Servers) -> None:
    lengths = [3 + 7 * i % 40 for i in range(30)]
    pending = [ask_later(servers, f"crowd-{i}", n=n) for i, n in enumerate(lengths)]
    for length, future in zip(lengths, pending, strict=True):
        reply = future.result(HANG_S)[1]
        assert len(reply["output_ids"]) == length
        assert_matches(servers, "a", reply)


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_in_pieces(servers: Servers) -> None:
    run, engine = servers.loop.run, servers.engine
    alone = run(engine.generate(request("alone", seed=7, n=40))).token_ids.tolist()
    others = [servers.loop.submit(engine.generate(request(f"other-{i}", seed=100 + i, n=60))) for i in range(6)]
    crowded = run(engine.generate(request("crowded", seed=7, n=40))).token_ids.tolist()
    results = [(*future.result(HANG_S).token_ids,) for future in others]
    assert crowded == alone
    assert len(set(results)) == len(results), "different seeds must differ"
    begun = alone[:15]
    resumed = run(
        engine.generate(request("resumed", seed=7, n=len(alone) - 15, tokens=PROMPT + begun))
    ).token_ids.tolist()
    assert begun + resumed == alone


def test_samples_follow_the_softmax(servers: Servers) -> None:
    temperature, num_samples = 1.3, 4000
    counts = torch.zeros(VOCAB_SIZE)
    for start in range(0, num_samples, 1000):
        for token_id in first_tokens(servers, range(10_000 + start, 11_000 + start), temperature=temperature):
            counts[token_id] += 1
    with torch.no_grad():
        logits_V = servers.models["a"](torch.tensor([PROMPT])).logits[0, -1]
    expected = torch.softmax(logits_V / temperature, -1) * num_samples
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    chi_square = float(((observed - expected) ** 2 / expected.clamp_min(1e-9)).sum())
    num_free = int(common.sum())
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square with num_free degrees of freedom
    bound = num_free * (1 - 2 / (9 * num_free) + 3.719 * (2 / (9 * num_free)) ** 0.5) ** 3
    assert num_free > 10
    assert chi_square < bound


def test_truncated_sampling_stays_inside(servers: Servers) -> None:
    with torch.no_grad():
        probs = torch.softmax(servers.models["a"](torch.tensor([PROMPT])).logits[0, -1], -1)
    ordered = probs.sort(descending=True)
    nucleus = int((ordered.values.cumsum(0) - ordered.values <= 0.5).sum())
    allowed = {
        "top_k": (3, ordered.indices[:3]),
        "top_p": (0.5, ordered.indices[:nucleus]),
        "min_p": (0.3, (probs >= 0.3 * probs.max()).nonzero()[:, 0]),
    }
    if servers.kind != "embedded":
        del allowed["min_p"]  # SGLang 0.5.23 cannot combine it with a seed (srt/layers/sampler.py:831)
    for name, (value, token_ids) in allowed.items():
        assert set(first_tokens(servers, range(300), **{name: value})) == set(token_ids.tolist()), name


def test_stop_tokens_end_a_response_and_are_part_of_it(servers: Servers) -> None:
    free = ask(servers, n=30, sampling_seed=11)["output_ids"]
    stop = free[9]
    result = servers.loop.run(servers.engine.generate(request("stops", seed=11, n=30, stop_token_ids=(stop,))))
    end = free.index(stop) + 1
    if EOS not in free[:end]:
        assert result.token_ids.tolist() == free[:end]
        assert result.finish_reason == "stop"
    length = ask(servers, n=30, sampling_seed=11, stop_token_ids=[stop])
    assert length["output_ids"] == free, "ignore_eos ignores stop tokens too"


def cut_at(tokens: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens up to the first end, and all of them without one."""
    num = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[:num])


@pytest.mark.parametrize("pieces", [None, 5])
def test_a_response_ends_at_the_first_stop_token_of_its_run_and_nowhere_else(
    servers: Servers, pieces: int | None
) -> None:
    """The run's stop tokens decide: one that only the model's files name, here EOS, ends nothing if it is left out."""
    num_tokens, samples = 48, [Sample.of(f"{i}.0", Prompt(i, tuple(PROMPT), "", "", "test")) for i in range(8)]
    seeds = [sample_seed(3, sample.sample_id) for sample in samples]
    free = [ask(servers, n=num_tokens, temperature=1.0, sampling_seed=seed)["output_ids"] for seed in seeds]
    assert any(EOS in tokens for tokens in free), "otherwise no server would stop by itself"
    others = [tokens[9] for tokens in free[:2]]
    config = RolloutConfig(max_response_tokens=num_tokens, tokens_per_round=pieces)
    for ends in ((EOS, *others), tuple(others)):
        dispatcher = Dispatcher(config, servers.pool, stop_token_ids=ends, run_seed=3)
        dispatcher.version = servers.version
        found: dict[str, Sample] = {}
        growing = samples
        while growing:
            grown: list[Sample] = []
            servers.loop.run(dispatcher.grow_together(growing, 0, grown.append))
            found |= {sample.sample_id: sample for sample in grown}
            growing = [sample for sample in grown if isinstance(sample.need, NeedsTokens)]
        for sample, tokens in zip(samples, free, strict=True):
            whole, expected = found[sample.sample_id], cut_at(tokens, ends)
            assert tuple(whole.turn.token_ids[len(PROMPT) :].tolist()) == expected
            assert isinstance(whole.need, NeedsEnvironment)
            assert whole.need.turn_end == ("stop" if expected[-1] in ends else "length")


TEMPLATE = "<begin>{% for m in messages %}{{ m.role }} {{ m.content }}<end>{% endfor %}<begin>"
CHAT = [("user", "a<end>b"), ("assistant", "c"), ("user", "é")]


def test_a_prompts_tokens_are_those_that_were_sent_whatever_its_words_spell(servers: Servers) -> None:
    """No engine adds a begin or an end, or reads a control token into words."""
    letters = [*map(chr, range(ord("!"), ord("{"))), " "]
    vocabulary = {name: i for i, name in enumerate(("<pad>", "<eos>", "<unk>", "<begin>", "<end>"))}
    vocabulary |= {letter: len(vocabulary) + i for i, letter in enumerate(letters)}
    assert len(vocabulary) == VOCAB_SIZE
    one = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    one.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    one.add_special_tokens(["<pad>", "<eos>", "<begin>", "<end>"])
    special = [("<eos>", EOS), ("<begin>", vocabulary["<begin>"])]
    one.post_processor = processors.TemplateProcessing(single="<begin> $A <eos>", special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=one, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    chat = Continuation(tokenizer, {}).whole([{"role": role, "content": text} for role, text in CHAT])
    turns = [*"user a<end>b", "<end>", *"assistant c", "<end>", *"user ", "<unk>", "<end>"]
    plain = prompt_ids(tokenizer, "a<end>b")
    assert chat == [vocabulary[token] for token in ("<begin>", *turns, "<begin>")]
    assert plain == [vocabulary[token] for token in ("<begin>", "a", "<end>", "b")]
    for token_ids in (chat, plain):
        reply = ask(servers, token_ids, 8, temperature=0)
        assert reply["meta_info"]["prompt_tokens"] == len(token_ids)
        expected = servers.models["a"].generate(
            torch.tensor([token_ids]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert reply["output_ids"] == expected[0, len(token_ids) :].tolist()


def test_weights_updated_in_place_take_over_at_the_next_token(servers: Servers) -> None:
    channel = servers.channel
    assert channel is not None
    (pending,) = servers.held(lambda: [ask_later(servers, "in-place-update")])
    before, version = servers.version, servers.push_in_place("b")
    status, reply = pending.result(HANG_S)
    assert status == 200
    spans = reply["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == [str(before), str(version)]
    assert reply["meta_info"]["num_retractions"] == 0
    cut = spans[1]["start"]
    old = reference_logprobs(servers.models["a"], PROMPT, reply["output_ids"])
    torch.testing.assert_close(logprobs_of(reply)[:cut], old[:cut], atol=TOLERANCE, rtol=0)
    assert (logprobs_of(reply)[cut:] - old[cut:]).abs().max() > 0.1


def test_a_client_that_leaves_frees_its_row(servers: Servers) -> None:
    asked = request("leaves", n=servers.num_long)
    (leaving,) = servers.held(lambda: [servers.loop.submit(servers.engine.generate(asked))])
    leaving.cancel()
    if servers.kind != "embedded":  # SGLang does not end requests in a pause
        servers.loop.run(servers.engine.resume())
    servers.wait_until_idle()


def test_a_rid_in_use_is_refused(servers: Servers) -> None:
    body = {"rid": "caught-0", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    (status, reply), _ = until_caught(servers, lambda: servers.post("/generate", body))
    assert status == 400
    assert "caught-0" in str(reply)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_ids": [5] * 5000}, "input"),
        ({"input_ids": []}, "input_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
    ],
)
def test_bad_requests_are_refused(servers: Servers, change: dict[str, Any], field: str) -> None:
    status, reply = servers.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}} | change)
    assert status == 400
    assert field in str(reply)
    assert ask(servers, n=2)["output_ids"]


def test_a_token_outside_the_vocabulary_is_refused(servers: Servers) -> None:
    with pytest.raises(EngineError, match=rf"{servers.url}.*foreign.*{VOCAB_SIZE + 3}"):
        servers.loop.run(servers.engine.generate(request("foreign", tokens=[5, VOCAB_SIZE + 3])))


def test_client_reports_a_refusal_with_server_and_request(servers: Servers) -> None:
    with pytest.raises(EngineError, match=rf"{servers.url}.*long-one.*400"):
        servers.loop.run(servers.engine.generate(request("long-one", tokens=[5] * servers.max_context)))


def test_update_without_begin_is_refused(servers: Servers) -> None:
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "nobody"}
    status, reply = servers.post("/update_weights_from_distributed", body)
    assert status == 400
    assert "begin_weight_update" in str(reply)


@pytest.mark.parametrize(
    ("name", "shape"), [("model.norm.weight", (63,)), ("model.no_such.weight", (64,))], ids=["shape", "name"]
)
def test_foreign_weights_are_refused_before_anything_is_sent(
    servers: Servers, name: str, shape: tuple[int, ...]
) -> None:
    """The handshake refuses them; the servers keep the weights that they have."""
    manifest = {spec.name: spec for spec in servers.manifest("a")} | {name: TensorSpec(name, "float32", shape)}
    channel = BroadcastChannel(servers.pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit)
    with pytest.raises(EngineError, match=re.escape(name)) as raised:
        channel.connect(list(manifest.values()))
    assert servers.url in str(raised.value)
    assert_matches(servers, "a", ask(servers))


def test_a_vocabulary_of_another_size_is_named(servers: Servers) -> None:
    manifest = [
        TensorSpec(s.name, s.dtype, (s.shape[0] + 32, *s.shape[1:])) if s.shape[0] == VOCAB_SIZE else s
        for s in servers.manifest("a")
    ]
    channel = BroadcastChannel(servers.pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit)
    with pytest.raises(EngineError, match=rf"vocabulary has {VOCAB_SIZE} tokens, the policy's {VOCAB_SIZE + 32}"):
        channel.connect(manifest)


def test_another_dtype_is_named(servers: Servers) -> None:
    manifest = [TensorSpec(s.name, "bfloat16", s.shape) for s in servers.manifest("a")]
    channel = BroadcastChannel(servers.pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit)
    with pytest.raises(EngineError, match=r"float32.*bfloat16"):
        channel.connect(manifest)


def test_weights_that_all_servers_refuse_end_a_push_at_once(servers: Servers) -> None:
    """The handshake cannot know of these: the learner breaks its manifest, or a server has changed."""
    channel, servers.channel = servers.channel, None
    assert channel is not None
    wrong = TensorSpec("model.norm.weight", "float32", (63,))
    channel.plan = plan_buckets([wrong], 2**20)
    channel.session.manifest = (wrong,)
    try:
        with pytest.raises(EngineError, match=r"model\.norm\.weight") as raised:
            channel.push(iter([(wrong.name, torch.zeros(wrong.shape))]), servers.version + 1)
        assert "waited" not in str(raised.value), "it did not wait for the push's deadline"
        assert servers.pool.live() == servers.engines, "nobody is fenced for what is the trainer's fault"
    finally:
        for engine in servers.engines:
            with contextlib.suppress(EngineError):  # a failed update may have closed the session already
                servers.loop.run(engine.transport.end())
            servers.loop.run(engine.resume())
    assert_matches(servers, "a", ask(servers))


def test_an_incomplete_push_is_noticed(servers: Servers) -> None:
    assert servers.channel is not None
    weights = dict(servers.weights["a"])
    del weights["model.norm.weight"]
    servers.version += 1
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        servers.channel.push(iter(weights.items()), servers.version)


def test_weights_from_disk_replace_those_of_all_servers(servers: Servers, tmp_path: Path) -> None:
    hf_path = Path(servers.get("/model_info")["model_path"])
    channel = DiskChannel(
        servers.pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit, folder=tmp_path / "weights", hf_path=hf_path
    )
    channel.connect(servers.manifest("b"))
    for model in ("b", "a", "b"):
        servers.version += 1
        stats = channel.push(iter(servers.weights[model].items()), servers.version)
        assert stats.is_whole
        assert [folder.name for folder in (tmp_path / "weights").iterdir()] == [f"v-{servers.version}"]
    for engine in servers.engines:
        result: GenerateResult = servers.loop.run(engine.generate(request("from-disk", n=32)))
        assert {span.version for span in result.spans} == {servers.version}
        expected = reference_logprobs(servers.models["b"], PROMPT, list(result.token_ids))
        torch.testing.assert_close(torch.tensor(result.behaviour_logprobs), expected, atol=TOLERANCE, rtol=0)


def test_connecting_to_nobody_names_who_is_missing(servers: Servers) -> None:
    with reserved_ports(1) as (port,):
        absent = HttpEngine(f"http://127.0.0.1:{port}", request_timeout_s=HANG_S)
        pool = EnginePool([servers.engine, absent])
        channel = BroadcastChannel(pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit)
        with pytest.raises(EngineError, match=rf"127\.0\.0\.1:{port}"):
            channel.connect(servers.manifest("a"))
        servers.loop.run(absent.close())


def test_a_paused_server_is_healthy(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a server that a failed push left paused would never take part again."""
    monkeypatch.setattr("bapo_megatron.engines.http._HEALTH_TIMEOUT_S", HANG_S)
    servers.loop.run(servers.engine.pause("retract"))
    assert servers.loop.run(servers.engine.health())
    servers.loop.run(servers.engine.resume())
    assert servers.loop.run(servers.engine.health())


def test_the_version_in_force_is_reported(servers: Servers) -> None:
    version = servers.push("b")
    for engine in servers.engines:
        assert servers.loop.run(engine.server_info())["weight_version"] == str(version)


def test_spans_of_an_untouched_request_cover_it(servers: Servers) -> None:
    result = servers.loop.run(servers.engine.generate(request("spans", n=10)))
    assert result.spans == (VersionSpan(servers.version, 0, len(result.token_ids)),)
    assert result.num_prompt_tokens == len(PROMPT)


def test_a_trace_is_written(servers: Servers, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    servers.loop.run(servers.engine.start_profile(str(folder)))
    servers.loop.run(servers.engine.generate(request("traced", n=4)))
    servers.loop.run(servers.engine.stop_profile())
    files = list(folder.glob("*.json.gz"))
    assert files
    for file in files:
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert any("aten::" in str(name) for name in names), file


def test_a_server_names_its_capabilities(servers: Servers) -> None:
    found = servers.loop.run(servers.engine.capabilities())
    assert {"gloo", "disk"} <= found.transports
    assert "score" in found.extras
    assert ({"weight_manifest", "weight_digests", "release"} <= found.extras) == (servers.kind == "embedded")


@pytest.mark.parametrize(("first", "top_k"), [(1, 0), (3, 5), (39, 1)])
def test_scores_are_log_probs_of_a_prefill(servers: Servers, first: int, top_k: int) -> None:
    """The tokens were not sampled, and there is no temperature."""
    generator = torch.Generator().manual_seed(first)
    token_ids = torch.randint(2, VOCAB_SIZE - 1, (40,), generator=generator)
    scores = servers.loop.run(servers.engine.score(token_ids.tolist(), first, top_k))
    with torch.no_grad():
        logits_NV = servers.models["a"](token_ids[None]).logits[0, first - 1 : -1].double()
    expected_NV = torch.log_softmax(logits_NV, -1)
    of_tokens_N = expected_NV.gather(1, token_ids[first:, None])[:, 0].float()
    torch.testing.assert_close(torch.tensor(scores.logprobs_N), of_tokens_N, atol=TOLERANCE, rtol=0)
    top_NK = expected_NV.topk(top_k, -1)
    assert scores.top_ids_NK.shape == (40 - first, top_k)
    torch.testing.assert_close(torch.tensor(scores.top_logprobs_NK), top_NK.values.float(), atol=TOLERANCE, rtol=0)
    of_ids_NK = expected_NV.gather(1, torch.tensor(scores.top_ids_NK).long()).float()
    torch.testing.assert_close(of_ids_NK, top_NK.values.float(), atol=TOLERANCE, rtol=0)  # or as likely ones


def assert_tops(servers: Servers, result: GenerateResult, temperature: float, num_old: int) -> None:
    """Compare a result's likeliest tokens with transformers, of weights "a" for `num_old` tokens, then of "b"."""
    ids_TK, logprobs_TK = (torch.tensor(rows) for rows in result.rows.values())
    output = result.token_ids.tolist()
    for model, part in (("a", slice(0, num_old)), ("b", slice(num_old, None))):
        with torch.no_grad():
            logits_TV = servers.models[model](torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1].double()
        expected_TV = torch.log_softmax(logits_TV / temperature, -1)[part]
        top_TK = expected_TV.topk(ids_TK.shape[1], -1).values.float()
        torch.testing.assert_close(logprobs_TK[part], top_TK, atol=TOLERANCE, rtol=0)
        of_ids_TK = expected_TV.gather(1, ids_TK[part].long()).float()
        torch.testing.assert_close(of_ids_TK, top_TK, atol=TOLERANCE, rtol=0)  # or as likely ones
    own_T = torch.tensor(result.token_ids)[:, None]
    is_top_TK = ids_TK == own_T
    sampled_T = torch.tensor(result.behaviour_logprobs)[is_top_TK.any(1)]
    assert len(sampled_T) > 0, "a sampled token is among the likeliest ones"
    torch.testing.assert_close(logprobs_TK[is_top_TK], sampled_T, atol=1e-6, rtol=0)


def test_likeliest_tokens_of_the_sampler_come_with_each_token(servers: Servers) -> None:
    """Alone, together, and over two weight versions; requests without them stay as they are."""
    streams = sampler_streams(7, VOCAB_SIZE)
    alone = servers.loop.run(servers.engine.generate(request("top", temperature=0.7, streams=streams)))
    assert_tops(servers, alone, 0.7, len(alone.token_ids))
    asked = [request(f"top-{i}", seed=i, n=4 + i, streams=streams) for i in range(3)]
    for one in servers.loop.run(servers.engine.generate_many(asked)):
        assert_tops(servers, one, 1.0, len(one.token_ids))
    without = servers.loop.run(servers.engine.generate(request("no-top", temperature=0.7)))
    assert (without.token_ids.tolist(), without.rows) == (alone.token_ids.tolist(), {})

    caught = request("top-over", n=servers.num_long, stop_token_ids=(), streams=streams)
    (pending,) = servers.held(lambda: [servers.loop.submit(servers.engine.generate(caught))])
    servers.push("b")
    over = pending.result(HANG_S)
    assert len(over.spans) == 2
    assert_tops(servers, over, 1.0, over.spans[0].end)


def test_scores_are_of_the_weights_in_use_and_leave_requests_alone(servers: Servers) -> None:
    token_ids = [*PROMPT, 3, 4]
    (pending,) = servers.held(lambda: [ask_later(servers, "next-to-scores")])
    servers.loop.run(servers.engine.resume())
    before = servers.loop.run(servers.engine.score(token_ids, 1, 0)).logprobs_N
    assert_matches(servers, "a", pending.result(HANG_S)[1])
    servers.push("b")
    after = servers.loop.run(servers.engine.score(token_ids, 1, 0)).logprobs_N
    assert abs(after - before).max() > 0.1


def test_a_policy_with_a_hint_scores_a_sample_as_after_the_hinted_prompt(servers: Servers) -> None:
    """Its rows are log-probs of two turns within 1e-5 nats, and carry the version of the weights."""
    hinted, turns, answer = [4, 44, *PROMPT, 17], ([3, 41, 2, 66], [5, 90, 33]), [8, 70, 12]
    teacher = Teacher(OwnServers(servers.pool).score, HANG_S, lambda prompt: hinted, servers.max_context)
    prompt = Prompt(1, tuple(PROMPT), "", "", "test")
    ended = Ended("stop", 1.0)
    first, second = (Segment.sampled(0, 0, turn, [-1.0] * len(turn)) for turn in turns)
    sample = Sample.of("1.0", prompt, [first, Segment.given("environment", answer), second], ended)
    for model in "ab":
        version = servers.push(model)
        rows = servers.loop.run(teacher.rows(sample))
        in_turn = [(hinted, turns[0]), ([*hinted, *turns[0], *answer], turns[1])]
        expected = torch.cat([reference_logprobs(servers.models[model], before, turn) for before, turn in in_turn])
        torch.testing.assert_close(torch.tensor(rows[TEACHER_LOGPROBS]), expected, atol=1e-5, rtol=0)
        assert rows[TEACHER_VERSIONS].tolist() == [version] * len(expected)


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_requests_outlive_a_push_as_the_channels_pause_mode_says(servers: Servers, mode: PauseMode) -> None:
    """In place, they continue with their cache; aborted, they return what they have."""
    before = servers.version
    channel = BroadcastChannel(servers.pool, SyncConfig(timeout_s=HANG_S), servers.loop.submit, pause_mode=mode)
    channel.connect(servers.manifest("b"))

    def push() -> None:
        servers.version += 1
        assert channel.push(iter(servers.weights["b"].items()), servers.version).is_whole

    if mode == "abort":
        _, (reply,) = until_caught(servers, push)
        assert 0 < len(reply["output_ids"]) < servers.num_long
        assert {span["version"] for span in reply["meta_info"]["weight_versions"]} <= {str(servers.version - 1)}
    else:
        (pending,) = servers.held(lambda: [ask_later(servers, "in-place-push")])
        push()
        status, reply = pending.result(HANG_S)
        assert status == 200, reply
        assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == [str(before), str(before + 1)]
        assert len(reply["output_ids"]) == servers.num_long
        assert reply["meta_info"]["num_retractions"] == 0
    channel.close()
    fresh = [81, 7, 3, servers.version % VOCAB_SIZE]  # SGLang continues a cached prefix, whatever weights computed it
    expected = reference_logprobs(servers.models["b"], fresh, (reply := ask(servers, fresh))["output_ids"])
    torch.testing.assert_close(logprobs_of(reply), expected, atol=TOLERANCE, rtol=0)


RELEASE, RESTORE = "/release_memory_occupation", "/resume_memory_occupation"


def test_calls_that_would_touch_released_memory_are_refused(servers: Servers) -> None:
    """SGLang without a GPU frees nothing, but its schedulers would end here as they do with one."""

    def call(path: str, *tags: str) -> None:
        assert servers.post(path, {"tags": tags})[0] == 200

    def refused(path: str, message: str, **body: Any) -> None:
        status, reply = servers.post(path, body)
        assert (status, reply["success"]) == (409, False), reply
        assert message in reply["message"]

    def released() -> list[str]:
        return servers.get("/released_memory")["released"]

    refused(RESTORE, "the memory of cuda_graph and kv_cache and weights is not released")
    refused(RELEASE, "pause_generation with mode=retract", tags=["weights"])
    (pending,) = servers.held(lambda: [ask_later(servers, "before-release")])
    refused(RELEASE, "pause_generation with mode=retract")
    servers.loop.run(servers.engine.pause("retract"))
    assert servers.post(RELEASE, {"tags": ["nonsense"]})[0] in (400, 409)
    assert released() == []
    call(RELEASE, "kv_cache")
    call(RELEASE, "weights", "cuda_graph")
    assert released() == ["cuda_graph", "kv_cache", "weights"]
    refused(RELEASE, "the memory of kv_cache is released already", tags=["kv_cache"])
    refused(RELEASE, "is released already")
    refused("/continue_generation", "is released: call resume_memory_occupation first")
    folder = {"model_path": "/nowhere", "weight_version": "9"}
    for path, body in (("/weights_checker", {"action": "checksum"}), ("/update_weights_from_disk", folder)):
        refused(path, "is released: call resume_memory_occupation first", **body)
    call(RESTORE, "weights")
    refused(RESTORE, "the memory of weights is not released", tags=["weights", "kv_cache"])
    assert servers.post("/weights_checker", {"action": "checksum"})[0] == 200
    refused("/continue_generation", "the memory of cuda_graph and kv_cache is released")
    call(RESTORE, "cuda_graph", "kv_cache")
    assert released() == []
    assert not pending.done()
    version = servers.push("a")
    reply = pending.result(HANG_S)[1]
    assert len(reply["output_ids"]) == servers.num_long
    assert reply["meta_info"]["weight_versions"][-1]["version"] == str(version)


HELD: list[frozenset[Memory]] = [frozenset(), frozenset({"weights"}), frozenset({"kv_cache"})]


@pytest.mark.parametrize("held", HELD, ids=lambda held: " ".join(held) or "nothing")
def test_released_memory_comes_back_with_a_push(servers: Servers, held: frozenset[Memory]) -> None:
    run, engine = servers.loop.run, servers.engine
    if "release" not in run(engine.capabilities()).extras:
        with pytest.raises(EngineError, match=rf"{servers.url} cannot release its memory.*enable-memory-saver"):
            run(engine.hold(held))
        return
    run(engine.hold(ALL_MEMORY))  # nothing is released, as in a process that has restarted
    (pending,) = servers.held(lambda: [ask_later(servers, "before-release")])
    with pytest.raises(EngineError, match="mode=retract"):
        run(engine.hold(held))
    for one in servers.engines:
        run(one.pause("retract"))
        for _ in range(2):
            run(one.hold(held))
        assert set(servers.get("/released_memory")["released"]) == ALL_MEMORY - held
    with pytest.raises(EngineError, match=r"HTTP 409.*call resume_memory_occupation first"):
        run(engine.resume())
    if "weights" in held:
        run(engine.hold(ALL_MEMORY))
        run(engine.resume())
        reply = pending.result(HANG_S)[1]
        expected = reference_logprobs(servers.models["a"], PROMPT, reply["output_ids"])
        torch.testing.assert_close(logprobs_of(reply), expected, atol=TOLERANCE, rtol=0)
        run(servers.engines[1].hold(ALL_MEMORY))
        return
    with pytest.raises(EngineError, match="memory of the weights is released"):
        run(engine.transport.digests())
    for one in servers.engines:
        run(one.hold(ALL_MEMORY))
        run(one.resume())  # by mistake: nothing may be sampled from lost weights
    with pytest.raises(EngineError, match="weights are not whole"):
        run(engine.score(PROMPT, 1, 0))
    run(engine.transport.begin())
    with pytest.raises(EngineError, match=r"the released memory held .* not pushed again"):
        run(engine.transport.end())
    assert not pending.done()
    servers.push("b")
    reply = pending.result(HANG_S)[1]
    cut = reply["meta_info"]["weight_versions"][1]["start"]
    for model, part in (("a", slice(0, cut)), ("b", slice(cut, None))):
        expected = reference_logprobs(servers.models[model], PROMPT, reply["output_ids"])[part]
        torch.testing.assert_close(logprobs_of(reply)[part], expected, atol=TOLERANCE, rtol=0)
