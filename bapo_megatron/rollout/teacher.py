"""A teacher on servers: an annotator that asks for the log-probs of a sample's tokens once the sample has ended.

    teacher.urls             servers of the user's own score the sample as it is
    teacher.urls_by_source   each data source has its own such servers
    teacher.hint             the run's engines score it after a prompt that tells more: the policy teaches itself

A server scores at temperature 1, whatever a request says. `TeacherServers.check` finds out whether servers of the
user's own can score the policy's tokens at all.
"""

import asyncio
import json
import string
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bapo_megatron.config.schema import TeacherConfig, hint_fields
from bapo_megatron.engines.base import GenerateRequest, TokenScores
from bapo_megatron.engines.http import HttpEngine
from bapo_megatron.engines.key import read_key
from bapo_megatron.engines.pool import EnginePool
from bapo_megatron.engines.transport import as_dict
from bapo_megatron.errors import EngineError, RequestRefusedError, UserError, in_one_line
from bapo_megatron.hf.tokenizer import difference, load_tokenizer
from bapo_megatron.prompts.base import Question
from bapo_megatron.prompts.encoding import prompt_ids, rendered_ids
from bapo_megatron.prompts.mixture import PromptMixture
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.resolved import Resolved
from bapo_megatron.tokens import TEACHER_LOGPROBS, TEACHER_STREAMS, TEACHER_VERSIONS, Array, Rows
from bapo_megatron.types import Prompt, Sample, Sampled, Trajectory

CHECK_TIMEOUT_S = 60.0
"""Deadline of each request of a check."""
_PROBE = "12+34=46, and 46-12=34.\nThe capital of France is Paris; naïve café, 東京."
_MAX_PROBE_TOKENS = 48
_NUM_LIKELIEST = 16
_NUM_SAMPLED = 8
_SLACK = 1e-3  # rounding, in probability and in nats
_MAX_MISMATCH = 0.2  # nats a token, mean: a decode and a prefill in low precision differ by hundredths
_RETRY_S = 1.0

Score = Callable[[Prompt, Sequence[int], int], Awaitable[TokenScores]]
"""Scores the tokens of a prompt's sample from an index on: (prompt, token_ids, first). Raises EngineError."""


@dataclass(frozen=True)
class Teacher:
    """An annotator (config/annotators.py)."""

    score: Score
    deadline_s: float
    context: Callable[[Prompt], Sequence[int]] | None = None  # the tokens in place of the prompt's own
    max_tokens: int | None = None  # the longest sequence that servers take

    streams: ClassVar = TEACHER_STREAMS

    async def rows(self, sample: Sample) -> Rows:
        """Return log-probs and weight versions of all sampled tokens."""
        with_tokens = [trajectory for trajectory in sample.trajectories if trajectory.num_sampled_tokens]
        found = await asyncio.gather(*(self._scored(sample.prompt, trajectory) for trajectory in with_tokens))
        return {
            TEACHER_LOGPROBS: TEACHER_LOGPROBS.joined(logprobs for logprobs, _ in found),
            TEACHER_VERSIONS: TEACHER_VERSIONS.joined(np.full(len(rows), version) for rows, version in found),
        }

    async def _scored(self, prompt: Prompt, trajectory: Trajectory) -> tuple[Array, int]:
        """Return the log-probs of the sampled tokens, and the weight version."""
        begin, *others = trajectory.segments
        assert np.array_equal(begin.token_ids, prompt.token_ids) or self.context is None, (
            "a hint replaces the row's prompt"
        )
        token_ids = [*(begin.token_ids.tolist() if self.context is None else self.context(prompt))]
        first, is_sampled = len(token_ids), np.array([isinstance(s.origin, Sampled) for s in others])
        token_ids += [token_id for segment in others for token_id in segment.token_ids.tolist()]
        is_sampled_N = is_sampled.repeat([segment.num_tokens for segment in others])
        last = first + int(is_sampled_N.nonzero()[0][-1])
        if self.max_tokens is not None and last >= self.max_tokens:
            raise ValueError(
                f"{last + 1} tokens with teacher.hint, and servers have room for {self.max_tokens}: raise "
                "data.max_prompt_tokens"
            )
        scores = await self.score(prompt, token_ids[: last + 1], first)
        return scores.logprobs_N[is_sampled_N[: len(scores.logprobs_N)]], scores.version


class TeacherServers:
    """Clients of the servers of all teachers, for one event loop. Raises UserError for a bad teacher.api_key."""

    def __init__(self, config: TeacherConfig, vocab_size: int, timeout_s: float) -> None:
        """`timeout_s`: deadline of one request."""
        key = None if config.api_key is None else read_key(config.api_key, "teacher.api_key")
        self._vocab_size, self._setting = vocab_size, config.given
        clients = {
            url: HttpEngine(
                url, request_timeout_s=timeout_s, vocab_size=vocab_size, key=key, key_setting="teacher.api_key"
            )
            for url in config.all_urls
        }
        self._clients = [*clients.values()]
        self._of_source = {name: [clients[url] for url in urls] for name, urls in config.urls_by_source.items()}

    async def score(self, prompt: Prompt, token_ids: Sequence[int], first: int) -> TokenScores:
        """Ask the server that caches this prompt, and if it fails, its source's next ones.

        Raises the last one's EngineError.
        """
        clients = self._of_source[prompt.source] if self._of_source else self._clients
        home = prompt.prompt_id % len(clients)
        for client in (*clients[home:], *clients[:home]):
            try:
                return await client.score(token_ids, first, 0)
            except RequestRefusedError:
                raise
            except EngineError as error:
                failure = error
        raise failure

    async def check(self, run: Resolved, tokenizer: Any) -> None:
        """Find out whether each server answers, has the policy's tokens, and scores them with log-probs that add up.

        Raises:
            UserError: names the first server that does not, and why.
        """
        for client in self._clients:
            try:
                await self._check(client, run, tokenizer)
            except EngineError as error:
                raise UserError(f"{self._setting}: {error}") from error

    async def _check(self, client: HttpEngine, run: Resolved, tokenizer: Any) -> None:
        def refuse(problem: str, remedy: str) -> UserError:
            return UserError(f"{self._setting}: {client.url} {problem}; {remedy}")

        info = await client.server_info()
        if "score" not in (await client.capabilities()).extras:
            raise refuse("cannot score tokens", "use SGLang 0.5.23, or `bapo serve`")
        longest, room = run.config.longest_trained, info.get("context_length")
        if isinstance(room, int) and room < longest:
            problem = f"has a context of {room} tokens, and the run's longest sequence has {longest}"
            raise refuse(problem, "start it with a longer one")
        if problem := await self._other_tokens(client, info, run, tokenizer):
            raise refuse(problem, "serve a model with the policy's tokenizer")
        if problem := await self._wrong_scores(client, tokenizer):
            raise refuse(problem, "serve a model of the policy's family, with SGLang 0.5.23 or `bapo serve`")

    async def _other_tokens(self, client: HttpEngine, info: dict[str, Any], run: Resolved, tokenizer: Any) -> str:
        """Compare the server's tokens with the policy's: by its files, if they are here, and by a text, if it can.

        Returns what differs, or "".
        """
        size = info.get("vocab_size")
        if isinstance(size, int) and size < self._vocab_size:
            return f"has a vocabulary of {size} tokens, but the policy's has {self._vocab_size}"
        folder = Path(str(info.get("tokenizer_path") or info.get("model_path")))
        if (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file():
            try:
                return difference(load_tokenizer(folder, run.own), tokenizer)
            except Exception as error:  # transformers raises many kinds for a damaged file
                return f"has a tokenizer that cannot be compared with the policy's: {in_one_line(error)[:300]}"
        try:
            body = {"prompt": _PROBE, "add_special_tokens": False}
            found = as_dict(await client.ask("POST", "/tokenize", body)).get("tokens")
        except EngineError:  # only some servers have this route
            return ""
        mine = rendered_ids(tokenizer, _PROBE)
        return "" if found == mine else f"has another tokenizer: {_PROBE[:23]!r}... is {found!r:.60}, not {mine!r:.60}"

    async def _wrong_scores(self, client: HttpEngine, tokenizer: Any) -> str:
        """Measure scores of a text, and of tokens that the server samples at temperature 1. Return what is wrong."""
        token_ids = prompt_ids(tokenizer, _PROBE)[:_MAX_PROBE_TOKENS]
        scores = await client.score(token_ids, 1, min(_NUM_LIKELIEST, self._vocab_size))
        if (outside := scores.top_ids_NK >= self._vocab_size).any():
            mass = float((np.exp(scores.top_logprobs_NK) * outside).sum(1).max())
            if mass > _SLACK:
                return f"gives tokens beyond the policy's vocabulary of {self._vocab_size} a probability of {mass:.2g}"
        if (total := float(np.exp(scores.top_logprobs_NK, dtype=np.float64).sum(1).max())) > 1 + _SLACK:
            return f"scores its likeliest tokens with probabilities that add up to {total:.4g}"
        is_token_NK = scores.top_ids_NK == np.array(token_ids[1:])[:, None]
        found_N = np.where(is_token_NK, scores.top_logprobs_NK, -np.inf).max(1)
        least_N = np.where(is_token_NK.any(1), found_N, -np.inf)
        most_N = np.where(is_token_NK.any(1), found_N, scores.top_logprobs_NK[:, -1])
        if ((scores.logprobs_N < least_N - _SLACK) | (scores.logprobs_N > most_N + _SLACK)).any():
            return "scores tokens otherwise than the same tokens among its likeliest ones"
        request = GenerateRequest("teacher-check", tuple(token_ids), _NUM_SAMPLED, 1.0, (), 1)
        sampled = await client.generate(request)
        again = await client.score([*token_ids, *sampled.token_ids.tolist()], len(token_ids), 0)
        mismatch = float(np.abs(again.logprobs_N - sampled.behaviour_logprobs).mean())
        if not mismatch <= _MAX_MISMATCH:
            return f"scores tokens that it has sampled at temperature 1 {mismatch:.2g} nats off, on average"
        return ""

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class OwnServers:
    """The run's engines as scorers. Their weights are the policy's: a score has the version of a push."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def score(self, prompt: Prompt, token_ids: Sequence[int], first: int) -> TokenScores:
        """Ask the engine that caches this prompt until it answers: pushes and restarts take a while."""
        while True:
            if (engine := self._pool.home(prompt.prompt_id)) is not None:
                try:
                    scores = await engine.score(token_ids, first, 0)
                except RequestRefusedError:
                    raise
                except EngineError:
                    pass
                else:
                    if 0 <= scores.version <= self._pool.newest_version:  # it has not restarted with other weights
                        return scores
            await asyncio.sleep(_RETRY_S)

    async def check(self) -> None:
        """Raise UserError if an engine cannot score."""
        for engine in self._pool.live():
            if "score" not in (await engine.capabilities()).extras:
                raise UserError(f"teacher.hint: {engine.url} cannot score tokens; set another rollout.engine")


class _Words(string.Formatter):
    """Writes strings as they are, and other JSON values as JSON."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Hint:
    """Prompts that tell more: teacher.hint in the place of the user's last words."""

    words: str
    prompts: PromptStream | PromptMixture

    def __call__(self, prompt: Prompt) -> Sequence[int]:
        """Return the tokens. Raises UserError for a prompt that cannot have them."""
        where = f"prompt {prompt.prompt_id} of {prompt.source}"
        return self.prompts.reworded(prompt, partial(self._filled, answer=prompt.answer, where=where))

    def check(self, room: int) -> None:
        """Raise UserError for the first row that cannot have them, and for the longest, if it has more tokens than
        `room`. Of a procedural source, a sample is read."""

        def filled(question: Question, words: str) -> str:
            return self._filled(words, answer=question.answer, where=question.where)

        longest, where = max(self.prompts.lengths_reworded(filled), default=(0, ""))
        if longest > room:
            raise UserError(
                f"{where}: with teacher.hint, the prompt has {longest} tokens, and servers have room for {room} before "
                f"the longest response; raise data.max_prompt_tokens by {longest - room}"
            )

    def _filled(self, words: str, *, answer: Any, where: str) -> str:
        """Return the hint for the user's words in a prompt."""
        if answer is None and "answer" in hint_fields(self.words):
            raise UserError(f"teacher.hint has {{answer}}, and {where} has none")
        try:
            return _Words().format(self.words, prompt=words, answer=answer)
        except (LookupError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"teacher.hint does not fit the answer of {where}: {what}") from error


def hinted_teacher(
    teacher: TeacherConfig, prompts: PromptStream | PromptMixture, servers: OwnServers, longest: int
) -> Teacher:
    """Return the policy as its own teacher, which scores sequences of at most `longest` tokens."""
    assert teacher.hint is not None, "the caller has asked"
    return Teacher(servers.score, teacher.timeout_s, Hint(teacher.hint, prompts), longest)
