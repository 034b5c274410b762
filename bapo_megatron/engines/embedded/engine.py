"""Continuous batching: one thread that admits, prefills, decodes and finishes requests, and runs commands in between.

The sequences being decoded fill cache rows [0, n) without gaps, so every step works on plain views of the cache.
The rows after them keep ended sequences, until a row is needed or the weights change. A request that continues one,
perhaps after tokens of others, computes only what the row does not hold.
All state belongs to the engine thread; other threads reach it through `call`, which runs a function between two steps.
No token is ever sampled from weights that are only partly updated.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bapo_megatron.engines.base import Memory, PauseMode, TokenScores, listed
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.engines.embedded.sampler import sample
from bapo_megatron.engines.embedded.stream_rows import FedRows, Streams, sampled_rows
from bapo_megatron.errors import plural
from bapo_megatron.hf.streams import ServedTokens
from bapo_megatron.runtime.bodies import BadRequestError, NotNowError
from bapo_megatron.runtime.trace import Trace
from bapo_megatron.tokens import TokenStream, encoded_rows

_MAX_PREFILL_TOKENS = 8192  # padded tokens per prefill
_MAX_PADDING = 2.0  # no row of a prefill is padded to more than this many times its length
INITIAL_VERSION = "default"  # SGLang's name for the weights a server started with

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class _Job(Future[Result]):
    """A command for the engine thread, and the future of its outcome."""

    def __init__(self, command: Callable[[], Result], *, when_still: bool) -> None:
        super().__init__()
        self._command = command
        self.when_still = when_still  # run it while nothing is being decoded, or while paused

    def run(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._command())
            except Exception as problem:
                self.set_exception(problem)

    def fail(self, problem: BaseException) -> None:
        if self.set_running_or_notify_cancel():
            self.set_exception(problem)


@dataclass(slots=True, eq=False)
class Sequence:
    """A response in progress."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cut_logprobs: list[float] = field(default_factory=list)  # under the distribution cut by top_k, top_p, min_p
    num_top: int = 0  # likeliest tokens that the client wants at each place
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)  # these, the likeliest first
    version_starts: list[tuple[str, int]] = field(default_factory=list)  # weight version, and its first output token
    finish_reason: dict[str, Any] | None = None
    num_retractions: int = 0
    num_cached: int = 0  # leading tokens that its latest admission found in the cache
    outlived_weights: bool = False  # its cache row has entries of earlier weights
    on_token: Callable[[], None] | None = None  # called by the engine thread after each token
    streams: tuple[TokenStream, ...] = ()  # streams whose rows the client wants
    num_fed: int = 0  # leading inputs whose rows of fed streams are here, or at the client
    rows: dict[TokenStream, list[Tensor]] = field(default_factory=dict)  # the rows wanted, so far
    done: Future[Sequence] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # a waiting caller may leave, but only `abort` ends it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Return the weight version of each span of output tokens, as SGLang's `weight_versions`."""
        starts = self.version_starts  # empty if it was aborted before its first token
        ends = [*(start for _, start in starts[1:]), len(self.output_ids)][: len(starts)]
        return [{"version": v, "start": start, "end": end} for (v, start), end in zip(starts, ends, strict=True)]

    @property
    def own_seed(self) -> int | None:
        """The seed that the client chose, or None. A kept row is continued with the same one only, so that what other
        samples have left changes no sample."""
        return None if self.params.sampling_seed is None else self.seed

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the cache."""
        return min(self.num_cached, len(self.prompt_ids))

    @property
    def num_uncached(self) -> int:
        return self.num_tokens - self.num_cached

    @property
    def uncached_ids(self) -> list[int]:
        return self.token_ids[self.num_cached :]

    def continues(self, token_ids: list[int]) -> bool:
        """Whether it begins with these tokens and has more, and lacks no rows of fed streams for these."""
        num, own = len(token_ids), self.token_ids
        has_rows = self.num_fed >= num or not any(stream.on == "fed" for stream in self.streams)
        return num < len(own) and has_rows and own[:num] == token_ids

    def take_rows(self, rows_T: Mapping[TokenStream, Tensor], first: int = 0) -> None:
        """Keep the rows that are wanted and not yet here.

        Args:
            rows_T: [T, *shape], for all inputs from token `first` on, or for one sampled token.
        """
        for stream in self.streams:
            if stream in rows_T:
                is_fed = stream.on == "fed"
                part = rows_T[stream][self.num_fed - first : self.num_tokens - first] if is_fed else rows_T[stream]
                self.rows.setdefault(stream, []).append(part)

    def encoded_rows(self) -> dict[str, Any]:
        """Return the rows by name, as in a reply."""
        parts = ((stream, self.rows.get(stream, [stream.new_tensor(0)])) for stream in self.streams)
        return {stream.name: encoded_rows(torch.cat(rows).numpy()) for stream, rows in parts}

    def append(self, token_id: int, logprob: float, cut_logprob: float, version: str) -> None:
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.output_ids)))
        self.output_ids.append(token_id)
        self.logprobs.append(logprob)
        self.cut_logprobs.append(cut_logprob)
        if token_id in self.stop_ids:
            self.finish_reason = {"type": "stop", "matched": token_id}
        elif len(self.output_ids) == self.params.max_new_tokens:
            self.finish_reason = {"type": "length", "length": self.params.max_new_tokens}
        if self.on_token is not None:
            self.on_token()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A cache row of an ended sequence."""

    row: int
    token_ids: list[int]  # in the row
    seed: int | None  # as in `Sequence.own_seed`
    has_stopped: bool  # perhaps nothing follows, so it leaves the cache before sequences that were cut


class BatchingEngine:
    """Continuous batching of requests to one model.

    Args:
        end_ids: tokens that end every response, unless a request ignores them; None means config.json's.
        num_threads: CPU threads of the engine thread; None means torch's default. No other thread of the process may
            use more than one: with more threads than cores, OpenMP puts waiting threads to sleep between operators, and
            decoding takes twice the time.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_running: int,
        max_context: int,
        version: str = INITIAL_VERSION,
        end_ids: Collection[int] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.model = model
        self._end_ids = frozenset(model.spec.eos_token_ids if end_ids is None else end_ids)
        self.max_context = max_context
        self.max_running = max_running
        self.version = version
        self.paused: PauseMode | None = None
        self.is_torn = False  # an update is only partly in place: nothing is sampled until it is whole
        self.released: set[Memory] = set()
        self.lost: set[str] = set()  # names of weights not received again since their memory was released
        self.failure: BaseException | None = None  # the error that ended the engine thread
        self.ended: Future[None] = Future()  # resolves when the engine thread has ended
        self.num_generated_tokens = 0
        self._num_threads = num_threads
        self._trace: tuple[Trace, Path] | None = None  # the trace in progress, and its file
        self.cache = model.new_cache(num_rows=max_running, max_len=max_context)
        self._rows: list[Sequence] = []  # being decoded; the index is the cache row
        self._kept: list[_Kept] = []  # oldest first
        self._waiting: deque[Sequence] = deque()
        self._inbox: queue.SimpleQueue[_Job[Any]] = queue.SimpleQueue()
        self._deferred: deque[_Job[Any]] = deque()  # wait until nothing is being decoded
        self._gate = threading.Lock()  # a command may arrive while the thread ends
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    # Called from other threads ---------------------------------------------------------------------

    def new_sequence(
        self,
        rid: str,
        prompt_ids: list[int],
        params: SamplingParams,
        index: int = 0,
        *,
        streams: tuple[TokenStream, ...] = (),
        num_fed: int = 0,
        num_top: int = 0,
    ) -> Sequence:
        """Return a sequence for a request that fits this model. Sample `index` of n has seed `sampling_seed + index`.

        Args:
            streams: the model's streams whose rows to return.
            num_fed: leading inputs whose rows of fed streams are not wanted.
            num_top: likeliest tokens to return at each place, with their log-probs.

        Raises:
            BadRequestError: names the field that is wrong.
        """
        spec = self.model.spec
        total = len(prompt_ids) + params.max_new_tokens
        if total > self.max_context:
            raise BadRequestError(
                f"input_ids: {plural(len(prompt_ids), 'token')} and max_new_tokens={params.max_new_tokens} exceed the "
                f"context of {self.max_context} tokens"
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= spec.vocab_size:
            raise BadRequestError(f"input_ids: token ids must be in [0, {spec.vocab_size})")
        if num_top > spec.vocab_size:
            raise BadRequestError(f"top_logprobs_num: {num_top} exceeds the vocabulary of {spec.vocab_size}")
        stop_ids = frozenset() if params.ignore_eos else self._end_ids | frozenset(params.stop_token_ids or ())
        seed = secrets.randbits(63) if params.sampling_seed is None else (params.sampling_seed + index) % 2**63
        return Sequence(rid, prompt_ids, params, stop_ids, seed, num_top=num_top, streams=streams, num_fed=num_fed)

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue requests; each one's `done` resolves when it ends. Raises BadRequestError if a rid is in use."""

        def enqueue() -> None:
            in_use = {s.rid for s in self._all()}
            taken = next((s.rid for s in sequences if s.rid in in_use), None)
            if taken is not None:
                raise BadRequestError(f"rid: {taken!r} is in use")
            self._waiting.extend(sequences)

        def fail_all(queued: Future[None]) -> None:
            if (problem := queued.exception()) is not None:
                for sequence in sequences:
                    sequence.done.set_exception(problem)

        self.call(enqueue).add_done_callback(fail_all)

    def call(self, command: Callable[[], Result], *, when_still: bool = False) -> Future[Result]:
        """Run a function on the engine thread, between two steps. The call fails immediately if the thread has ended.

        Args:
            when_still: run it once nothing is being decoded, or the engine is paused.
        """
        job = _Job(command, when_still=when_still)
        with self._gate:
            if self.failure is None:
                self._inbox.put(job)
                return job
        job.fail(self.failure)
        return job

    # Commands: run on the engine thread, through `call` --------------------------------------------

    def abort(self, rids: Set[str] | None) -> int:
        """End some requests, or all (None), with their tokens so far. Return the number ended."""
        aborted = [s for s in self._all() if rids is None or s.rid in rids]
        for sequence in aborted:
            sequence.finish_reason = {"type": "abort", "message": "Abort"}
        self._finish_rows()
        ended = [s for s in self._waiting if s.finish_reason]
        self._waiting = deque(s for s in self._waiting if not s.finish_reason)
        for sequence in ended:
            self._finish(sequence)
        return len(aborted)

    def pause(self, mode: PauseMode) -> None:
        """abort: end all requests; retract: requeue them, cache dropped; in_place: hold them, cache kept."""
        self.paused = mode
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for sequence in self._rows:
                sequence.num_retractions += 1
            self._waiting.extendleft(reversed(self._rows))
            self._rows = []

    def resume(self) -> None:
        """Sample again. Raises NotNowError while memory is released."""
        if self.released:
            raise NotNowError(f"the memory of {listed(self.released)} is released: call resume_memory_occupation first")
        self.paused = None

    def flush_cache(self) -> None:
        """Drop what requests could continue. Raises BadRequestError while busy, as SGLang does."""
        if self._rows or (self._waiting and self.paused is None):
            raise BadRequestError(
                f"Cache not flushed because there are pending requests: {len(self._waiting)} queued, "
                f"{len(self._rows)} running"
            )
        self._kept.clear()

    def score(self, token_ids: list[int], first: int, top_k: int) -> TokenScores | None:
        """Score the tokens from index `first` on, as `Model.score`; return None while the weights are not whole."""
        if self.is_torn:
            return None
        scores = self.model.score(torch.tensor(token_ids), first, top_k)
        logprobs_N, top_ids_NK, top_logprobs_NK = (tensor.numpy() for tensor in scores)
        return TokenScores(logprobs_N, top_ids_NK, top_logprobs_NK, self._version_number)

    def release(self, memory: Set[Memory]) -> None:
        """Free memory, when still. Weights must be pushed again after `restore`. On a CPU there are no CUDA graphs.

        Raises:
            NotNowError: some is released already; or generation is not paused, or with requests that need the cache.
        """
        if self.paused is None or self._rows:
            raise NotNowError(
                "memory can be released while generation is paused: call pause_generation with mode=retract"
            )
        if again := self.released & memory:
            raise NotNowError(f"the memory of {listed(again)} is released already")
        self.released |= memory
        if "kv_cache" in memory:
            self._kept.clear()
            self.cache.release()
        if "weights" in memory:
            self.is_torn = True
            self.lost = set(self.model.named_weights)
            self.model.release()

    def restore(self, memory: Set[Memory]) -> None:
        """Use memory again. Raises NotNowError if some was not released."""
        if held := memory - self.released:
            raise NotNowError(f"the memory of {listed(held)} is not released")
        self.released -= memory

    def set_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy checked weights into place, when still; nothing is sampled until `publish`."""
        self.is_torn = True
        self._kept.clear()
        for sequence in self._rows:
            sequence.outlived_weights = True
        with torch.inference_mode():
            for name, tensor in tensors:
                self.model.named_weights[name].copy_(tensor)
                self.lost.discard(name)

    def publish(self, version: str | None) -> None:
        """Mark the weights as whole. Later tokens carry this version; None means the same as before.

        Raises:
            BadRequestError: weights that were lost with their memory have not been received again.
        """
        if self.lost:
            raise BadRequestError(
                f"the released memory held {plural(len(self.lost), 'weight')} not pushed again, such as "
                f"{min(self.lost)!r}: push all"
            )
        self.is_torn = False
        self.version = self.version if version is None else version

    def start_profile(self, folder: Path) -> None:
        """Trace the engine thread from now on. Raises BadRequestError if a trace is already in progress."""
        if self._trace is not None:
            raise BadRequestError("Profiling is already in progress. Call /stop_profile first.")
        self._trace = (Trace(), folder / "engine.trace.json.gz")

    def stop_profile(self) -> None:
        """Write the trace. Raises BadRequestError if none is in progress."""
        if self._trace is None:
            raise BadRequestError("Profiling is not in progress. Call /start_profile first.")
        (trace, path), self._trace = self._trace, None
        trace.write(path)

    def load(self) -> dict[str, int]:
        return {"num_running_reqs": len(self._rows), "num_waiting_reqs": len(self._waiting)}

    # The engine thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            while True:
                self._obey()
                if self.paused is None and not self.is_torn:
                    self._step()
        except BaseException as problem:
            log.exception("the engine stopped")
            with self._gate:
                self.failure = problem
            for sequence in self._all():
                if not sequence.done.done():
                    sequence.done.set_exception(problem)
            while not self._inbox.empty():
                self._deferred.append(self._inbox.get())
            for job in self._deferred:
                job.fail(problem)
            self.ended.set_result(None)

    def _obey(self) -> None:
        """Run the commands of other threads. If there is nothing else to do, wait for one."""
        if self.paused is not None or self.is_torn or not (self._rows or self._waiting):
            self._take(self._inbox.get())
        while not self._inbox.empty():
            self._take(self._inbox.get())
        while self._deferred and (self.paused is not None or not self._rows):
            self._deferred.popleft().run()

    def _take(self, job: _Job[Any]) -> None:
        if job.when_still:
            self._deferred.append(job)
        else:
            job.run()

    @torch.inference_mode()
    def _step(self) -> None:
        """Admit what fits, then sample one token for every sequence."""
        if self._waiting and not self._deferred and len(self._rows) < self.max_running:
            self._admit()
        if self._rows:
            positions = [s.num_tokens - 1 for s in self._rows]  # the last token, not yet in the cache
            last_ids_B = torch.tensor([(s.output_ids or s.prompt_ids)[-1] for s in self._rows])
            positions_B = torch.tensor(positions)
            fed = self._fed_rows(self._rows, last_ids_B[:, None], positions_B[:, None])
            logits_BV = self.model.decode(last_ids_B, positions_B, self.cache, fed)
            if fed is not None:
                self._take_fed(self._rows, fed, range(len(self._rows)), positions)
            self._extend(self._rows, logits_BV)

    def _admit(self) -> None:
        """Give free rows to waiting sequences, first come, first served: continue kept rows, or prefill."""
        num_admitted = min(self.max_running - len(self._rows), len(self._waiting))
        admitted = [self._waiting.popleft() for _ in range(num_admitted)]
        sources = self._take_kept(admitted)
        admitted.sort(key=lambda s: (s not in sources, s.num_uncached, s.token_ids))
        self._make_room(admitted, sources)
        first_row = len(self._rows)
        self._rows.extend(admitted)
        continued = [s for s in admitted if s in sources and s.num_uncached > 1]
        new = [s for s in admitted if s not in sources]
        first_row += len(admitted) - len(continued) - len(new)  # those that lack one token are decoded next
        logits = []
        for group in (*_similar_lengths(continued), *_similar_lengths(new)):
            logits.append(self._compute(group, first_row))
            first_row += len(group)
        if logits:
            self._extend([*continued, *new], torch.cat(logits))

    def _take_kept(self, admitted: list[Sequence]) -> dict[Sequence, int]:
        """Take the longest kept row that each sequence continues by at least one token; return the rows."""
        by_seed: dict[int | None, list[_Kept]] = {}
        for kept in self._kept:
            by_seed.setdefault(kept.seed, []).append(kept)
        sources: dict[Sequence, int] = {}
        for sequence in admitted:
            mine = by_seed.get(sequence.own_seed, [])
            found = [kept for kept in mine if sequence.continues(kept.token_ids)]
            longest = max(found, key=lambda kept: len(kept.token_ids), default=None)
            sequence.num_cached = len(longest.token_ids) if longest else 0
            if longest:
                mine.remove(longest)
                sources[sequence] = longest.row
        taken = set(sources.values())
        self._kept = [kept for kept in self._kept if kept.row not in taken]
        return sources

    def _make_room(self, admitted: list[Sequence], sources: Mapping[Sequence, int]) -> None:
        """Move sequences that continue kept rows behind the decoded ones, and kept rows out of their way.

        If there are too many, those that have stopped leave first, and then the oldest.

        Example with 4 rows: row 0 is decoded, row 1 is kept, and a new sequence continues row 2. Decoded rows have no
        gap, so the sequence moves to row 1, and the row that was kept there moves to row 2.
        """
        targets = range(len(self._rows), len(self._rows) + len(admitted))
        num_leaving = max(len(self._kept) - (self.max_running - targets.stop), 0)
        leaving = {kept.row for kept in sorted(self._kept, key=lambda kept: not kept.has_stopped)[:num_leaving]}
        staying = [kept for kept in self._kept if kept.row not in leaving]
        free = iter(sorted(set(range(targets.stop, self.max_running)) - {kept.row for kept in staying}))
        self._kept = [replace(kept, row=next(free)) if kept.row in targets else kept for kept in staying]
        moved = {new.row: (old.row, len(old.token_ids)) for new, old in zip(self._kept, staying, strict=True)}
        moved |= {row: (sources[s], s.num_cached) for row, s in zip(targets, admitted, strict=True) if s in sources}
        moved = {target: source for target, source in moved.items() if target != source[0]}
        if moved:
            rows, lengths = zip(*moved.values(), strict=True)
            self.cache.arrange([*moved], rows, max(lengths))

    def _compute(self, group: list[Sequence], first_row: int) -> Tensor:
        """Compute what the cache rows of these sequences, from `first_row` on, lack; all rows are empty or none is.

        Equal sequences (samples of one prompt) must be adjacent; they are computed once.

        Returns: the logits after each sequence, float32 [len(group), V].
        """
        index, different, rows = [], [group[0]], [first_row]
        for row, sequence in enumerate(group, first_row):
            if (sequence.num_cached, sequence.token_ids) != (different[-1].num_cached, different[-1].token_ids):
                different.append(sequence)
                rows.append(row)
            index.append(len(different) - 1)
        starts, lengths = [s.num_cached for s in different], [s.num_uncached for s in different]
        ids_BT = [torch.tensor(s.uncached_ids) for s in different]
        token_ids_BT = torch.nn.utils.rnn.pad_sequence(ids_BT, batch_first=True)
        starts_B, lengths_B = torch.tensor(starts), torch.tensor(lengths)
        fed = self._fed_rows(group, token_ids_BT, starts_B[:, None] + torch.arange(max(lengths)))
        if starts[0]:
            if len(different) < len(group):
                self.cache.arrange([first_row + i for i in range(len(rows))], rows, max(starts))
            logits_BV = self.model.append(token_ids_BT, lengths_B, starts_B, self.cache, first_row, fed)
        else:
            logits_BV = self.model.prefill(token_ids_BT, lengths_B, self.cache, first_row, fed)
        if fed is not None:
            self._take_fed(group, fed, index, [s.num_cached for s in group])
        if len(different) == len(group):
            return logits_BV
        targets = range(first_row, first_row + len(group))
        self.cache.arrange(targets, [first_row + i for i in index], max(s.num_tokens for s in group))
        return logits_BV[index]

    @property
    def _version_number(self) -> int:
        return int(self.version) if self.version.isdecimal() else -1

    def _fed_rows(self, sequences: list[Sequence], token_ids_BT: Tensor, positions_BT: Tensor) -> FedRows | None:
        """Return the rows to compute in a pass, or None if no sequence wants any."""
        asked = self._asked(sequences)
        return FedRows(asked, self._served(token_ids_BT, positions_BT)) if asked else None

    def _asked(self, sequences: list[Sequence]) -> Streams:
        if not self.model.streams:
            return {}
        return {stream: self.model.streams[stream] for s in sequences for stream in s.streams}

    def _served(self, token_ids_BT: Tensor, positions_BT: Tensor, logits_BV: Tensor | None = None) -> ServedTokens:
        return ServedTokens(token_ids_BT, positions_BT, self._version_number, logits_BV=logits_BV)

    def _take_fed(self, sequences: list[Sequence], fed: FedRows, index: Iterable[int], first: Iterable[int]) -> None:
        """Give each sequence its rows of a pass, which read its tokens from `first` on as batch row `index`."""
        rows = fed.rows()
        for sequence, row, position in zip(sequences, index, first, strict=True):
            sequence.take_rows({stream: rows_BT[row] for stream, rows_BT in rows.items()}, position)
            sequence.num_fed = sequence.num_tokens

    def _extend(self, sequences: list[Sequence], logits_BV: Tensor) -> None:
        """Sample the next token of each sequence, and release the finished ones."""
        positions = [s.num_tokens for s in sequences]
        token_ids, logprobs, cut_logprobs = sample(
            logits_BV, [s.params for s in sequences], [s.seed for s in sequences], positions
        )
        if asked := self._asked(sequences):
            sampled = self._served(torch.tensor(token_ids)[:, None], torch.tensor(positions)[:, None], logits_BV)
            rows = sampled_rows(asked, sampled)
            for number, sequence in enumerate(sequences):
                sequence.take_rows({stream: rows_B1[number] for stream, rows_B1 in rows.items()})
        if num_top := max(s.num_top for s in sequences):
            top = torch.log_softmax(logits_BV, -1).topk(num_top)  # `sample` has applied the temperature
            for sequence, *row in zip(sequences, top.values.tolist(), top.indices.tolist(), strict=True):
                sequence.top_logprobs.append([*zip(*row, strict=True)][: sequence.num_top])
        version, num_finished = self.version, 0
        extended = zip(sequences, token_ids, logprobs, cut_logprobs, strict=True)
        for sequence, token_id, logprob, cut_logprob in extended:
            if math.isnan(logprob):
                problem = FloatingPointError("the model's logits are not finite; the weights are broken")
                sequence.done.set_exception(problem)
                sequence.finish_reason = {"type": "abort", "message": "not finite"}
            else:
                sequence.append(token_id, logprob, cut_logprob, version)
            num_finished += sequence.finish_reason is not None
        self.num_generated_tokens += len(token_ids)
        if num_finished:
            self._finish_rows()

    def _finish_rows(self) -> None:
        """Take finished sequences out of their rows; the last ones fill the gaps. Keep rows that may be continued."""
        finished = [row for row, sequence in enumerate(self._rows) if sequence.finish_reason is not None]
        for row in finished:
            if self._rows[row].done.done():  # it has failed: nan in the row would spread to those that have it next
                self.cache.clear(row)
        num_left = len(self._rows) - len(finished)
        gaps = [row for row in finished if row < num_left]
        if gaps:
            moving = sorted(set(range(num_left, len(self._rows))) - set(finished))
            longest = max(s.num_tokens for s in self._rows) - 1
            self.cache.arrange([*gaps, *moving], [*moving, *gaps], longest)
            for gap, row in zip(gaps, moving, strict=True):
                self._rows[gap], self._rows[row] = self._rows[row], self._rows[gap]
        ended, self._rows = self._rows[num_left:], self._rows[:num_left]
        for row, sequence in enumerate(ended, num_left):
            assert sequence.finish_reason is not None
            if not (sequence.done.done() or sequence.outlived_weights):  # done: it has failed
                has_stopped = sequence.finish_reason["type"] == "stop"
                self._kept.append(_Kept(row, sequence.token_ids[:-1], sequence.own_seed, has_stopped))
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if not sequence.done.done():  # otherwise it has failed
            sequence.done.set_result(sequence)

    def _all(self) -> Iterator[Sequence]:
        yield from self._rows
        yield from self._waiting


def _similar_lengths(sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    """Split a list sorted by length into groups that waste little padding and stay within the prefill budget."""
    group: list[Sequence] = []
    for sequence in sequences:
        length = sequence.num_uncached
        too_many = length * (len(group) + 1) > _MAX_PREFILL_TOKENS
        if group and (too_many or length > _MAX_PADDING * group[0].num_uncached):
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group
