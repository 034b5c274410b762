"""Per-token values. Each kind is declared once, as a `TokenStream`, which every later stage reads.

    engine's reply -> Segment -> checkpoint, recording -> Batch -> every rank that needs it -> MicroBatch -> loss

A declaration says what one row is and which tokens have rows; it checks, encodes, joins and fills them. Values that
every run has are typed attributes of `Segment`, `Batch` and `MicroBatch`, named after their stream; the values of a
model or a plugin are in `rows` and `extra`, with the stream as key.
"""

import binascii
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class TokenStream:
    """One kind of per-token value.

    Example: TokenStream("routes", "uint8", (24, 8), missing=255, on="fed", to="owner's stage") holds the experts that
    24 layers chose for an input token.
    """

    name: str
    dtype: str  # a name that numpy and torch share
    shape: tuple[int, ...] = ()  # one row's; may depend on the model. Stages split the first axis, the layers
    missing: float | None = None  # value of a row that no engine sent; None means that a missing row is an error
    on: Literal["token", "sampled", "fed"] = "sampled"
    #   token    one row per token
    #   sampled  one row per sampled token; arrives with the reply that sampled it
    #   fed      one row per token that was an input. It is stored with the next token, because that token's reply
    #            delivers it: the row of position t - 1 belongs to token t, given or sampled. Token 0 has none.
    kept: bool = True  # in checkpoints and recordings; False means computed within a step
    to: Literal["every rank", "owner", "owner's stage"] = "owner"  # who needs it: ranks that hold the sequence, mostly
    least: float | None = None  # the bounds of valid values
    most: float | None = None
    distinct: bool = False  # the values along a row's last axis differ
    on_request: bool = False  # only runs that learn with it ask engines for it, and these must return it

    def __post_init__(self) -> None:
        """Raise ValueError if the declaration contradicts itself."""
        if not (isinstance(getattr(torch, self.dtype, None), torch.dtype) and self.dtype in np.sctypeDict):
            raise ValueError(f"stream {self.name}: numpy and torch do not both have the type {self.dtype}")
        if self.to == "owner's stage" and not self.shape:
            raise ValueError(
                f"stream {self.name}: the shape of a row must begin with the layers, to give a stage its part"
            )

    @property
    def filler(self) -> float:
        """The value for tokens without a row, including padding."""
        return 0 if self.missing is None else self.missing

    @property
    def row_bytes(self) -> int:
        """The size of one row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=int))

    def check_kept(self, taken: Iterable[str]) -> None:
        """Raise ValueError if an engine cannot return this stream, or its name is a core stream's or one of `taken`."""
        self._check_name(taken)
        if not self.kept or self.on == "token":
            raise ValueError(f"stream {self.name}: engines return rows of sampled or fed tokens, which are kept")

    def check_computed(self, taken: Iterable[str]) -> None:
        """Raise ValueError if the learner cannot compute this stream within a step: see `check_kept`."""
        self._check_name(taken)
        if self.kept or self.on != "sampled" or self.to == "owner's stage":
            raise ValueError(
                f"stream {self.name}: a step computes rows of sampled tokens, of all layers: use kept=False, "
                'on="sampled", and to="owner" or "every rank"'
            )

    def check_annotated(self, taken: Iterable[str]) -> None:
        """Raise ValueError if an annotator cannot add this stream to ended samples: see `check_kept`."""
        self._check_name(taken)
        if not self.kept or self.on != "sampled" or self.missing is None or self.on_request or self.dtype == "bool":
            raise ValueError(
                f"stream {self.name}: an annotator adds numbers to sampled tokens, which are kept, and may fail: leave "
                "`kept`, `on` and `on_request` out, and give `missing`"
            )

    def _check_name(self, taken: Iterable[str]) -> None:
        if self.name in {*taken, *SAMPLER_STREAMS, *(stream.name for stream in (*CORE_STREAMS, *TEACHER_STREAMS))}:
            raise ValueError(f"stream {self.name}: the name is taken")

    @property
    def is_needed(self) -> bool:
        """Whether an engine that is asked for it must return it."""
        return self.missing is None or self.on_request

    def checked(self, values: Any, num_rows: int, *, filled: bool = False) -> Array:
        """Return the rows as a read-only array [num_rows, *shape].

        Args:
            values: an array of this type, or the result of `encoded_rows` read from JSON.
            filled: rows that hold nothing but `missing` are valid.

        Raises:
            ValueError: names the stream and what is wrong.
        """
        rows = self._decoded(values)
        if str(rows.dtype) != self.dtype:
            raise ValueError(f"stream {self.name}: rows are {rows.dtype}, not {self.dtype}")
        if rows.shape != (num_rows, *self.shape):
            raise ValueError(f"stream {self.name}: rows of shape {list(rows.shape)}, not {[num_rows, *self.shape]}")
        has_missing = filled and self.missing is not None
        is_missing = (rows == self.missing).all(tuple(range(1, rows.ndim))) if has_missing else np.zeros(num_rows, bool)
        for values, is_bad, fault in self._faults(rows):
            is_bad[is_missing] = False
            if is_bad.any():
                place = np.unravel_index(is_bad.argmax(), is_bad.shape)
                raise ValueError(f"stream {self.name}: row {place[0]} {fault.format(values[place])}")
        return read_only(rows)

    def _faults(self, rows: Array) -> Iterator[tuple[Array, Array, str]]:
        """Yield values in the order of the rows, which of them are bad, and why."""
        if self.least is not None:
            yield rows, ~(rows >= self.least), f"has {{}}, not >= {self.least:g}"
        if self.most is not None:
            yield rows, ~(rows <= self.most), f"has {{}}, not <= {self.most:g}"
        if self.distinct and _has_repeats(rows):
            ordered = np.sort(rows, axis=-1)
            yield ordered[..., 1:], ordered[..., 1:] == ordered[..., :-1], "has {} twice"

    def joined(self, parts: Iterable[Array]) -> Array:
        """Return the rows of all parts, read-only."""
        return read_only(np.concatenate([self.filled(0), *parts]))

    def filled(self, num_rows: int) -> Array:
        """Return rows that hold the filler."""
        return np.full((num_rows, *self.shape), self.filler, self.dtype)

    def new_tensor(self, num_rows: int) -> Tensor:
        """Return a tensor of rows that hold the filler."""
        return torch.full((num_rows, *self.shape), self.filler, dtype=getattr(torch, self.dtype))

    def _decoded(self, values: Any) -> Array:
        if isinstance(values, np.ndarray):
            return values
        if self.shape:
            import pybase64  # late: plugins run without it

            try:
                data = pybase64.b64decode(values, validate=True)
            except (TypeError, ValueError, binascii.Error):
                raise ValueError(f"stream {self.name}: rows of shape {list(self.shape)} must be base64") from None
            if len(data) % max(self.row_bytes, 1):
                raise ValueError(f"stream {self.name}: {len(data)} bytes are not rows of {self.row_bytes}")
            return np.frombuffer(data, self.dtype).reshape(-1, *self.shape)
        is_integer = np.issubdtype(self.dtype, np.integer)
        allowed, kind = ({int}, "whole number") if is_integer else ({int, float}, "number")
        if not isinstance(values, list):
            raise ValueError(f"stream {self.name}: must be a list of {kind}s")
        if not {*map(type, values)} <= allowed:
            row = next(i for i, value in enumerate(values) if type(value) not in allowed)
            raise ValueError(f"stream {self.name}: row {row} is not a {kind}")
        try:
            with np.errstate(over="ignore"):
                return np.array(values, self.dtype if is_integer else np.float64).astype(self.dtype)
        except OverflowError:
            raise ValueError(f"stream {self.name}: a number does not fit {self.dtype}") from None


def _has_repeats(rows: Array) -> bool:
    """Return whether any two values along the last axis are equal. A few columns are compared faster than sorted."""
    num = rows.shape[-1]
    if num > _MOST_COMPARED:
        ordered = np.sort(rows, axis=-1)
        return bool((ordered[..., 1:] == ordered[..., :-1]).any())
    columns = np.ascontiguousarray(rows.reshape(-1, num).T)
    return any(bool((columns[shift:] == columns[:-shift]).any()) for shift in range(1, num))


_MOST_COMPARED = 16

Rows = Mapping[TokenStream, Array]
"""Rows of some tokens, by their stream. Read-only."""

_LOWEST = float(np.finfo(np.float32).min)

TOKEN_IDS = TokenStream("token_ids", "int64", on="token", least=0)
SAMPLED = TokenStream("sampled", "bool", on="token", kept=False, to="every rank")
BEHAVIOUR_LOGPROBS = TokenStream("behaviour_logprobs", "float32", least=_LOWEST, most=0.0)
VERSIONS = TokenStream("versions", "int64", missing=-1, kept=False)
ADVANTAGES = TokenStream("advantages", "float32", kept=False)
MASK = TokenStream("mask", "bool", kept=False, to="every rank")
PROXIMAL_LOGPROBS = TokenStream("proximal_logprobs", "float32", kept=False)
REFERENCE_LOGPROBS = TokenStream("reference_logprobs", "float32", kept=False)
TEACHER_LOGPROBS = TokenStream("teacher_logprobs", "float32", missing=1.0, least=_LOWEST, most=0.0)
TEACHER_VERSIONS = TokenStream("teacher_versions", "int64", missing=-2)
TEACHER_STREAMS = (TEACHER_LOGPROBS, TEACHER_VERSIONS)
"""What servers add to ended samples; a teacher in the learner computes the log-probs within a step. The weights that
scored have the version, and -1 is a server's initial weights."""

SAMPLER_TOP_IDS = "sampler_top_ids"
SAMPLER_TOP_LOGPROBS = "sampler_top_logprobs"
SAMPLER_STREAMS = (SAMPLER_TOP_IDS, SAMPLER_TOP_LOGPROBS)
"""The names of what an engine adds to each token that it samples: its likeliest tokens and their log-probs, at the
rollout's temperature."""


def sampler_streams(top_k: int, vocab_size: int) -> tuple[TokenStream, ...]:
    """Declare the `top_k` likeliest tokens of a sampler and their log-probs; none if `top_k` is 0."""
    if not top_k:
        return ()
    return (
        TokenStream(SAMPLER_TOP_IDS, "int32", (top_k,), least=0, most=vocab_size - 1, distinct=True),
        TokenStream(SAMPLER_TOP_LOGPROBS, "float32", (top_k,), least=_LOWEST, most=0.0),
    )


CORE_STREAMS = (
    TOKEN_IDS,
    SAMPLED,
    BEHAVIOUR_LOGPROBS,
    VERSIONS,
    ADVANTAGES,
    MASK,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
)
"""Streams with a typed attribute of their name: `Batch.<name>_T`, and, on sampled tokens and for the mask,
`MicroBatch.<name>_R`."""


class JoinedRows:
    """Rows of many segments, joined by stream name for a file, and taken out in the order they were put in."""

    def __init__(self, arrays: Mapping[str, Array] | None = None) -> None:
        self._arrays = arrays or {}
        self._parts: dict[str, list[Array]] = defaultdict(list)
        self._num_taken: Counter[str] = Counter()

    def put(self, values: Mapping[str, Array]) -> dict[str, int]:
        """Append rows by name; return how many of each, for `take`."""
        for name, rows in values.items():
            self._parts[name].append(rows)
        return {name: len(rows) for name, rows in values.items()}

    def arrays(self) -> dict[str, Array]:
        """Return all rows that were put in, by name."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}

    def take(self, counts: Mapping[str, int]) -> dict[str, Array]:
        """Return the next rows by name. Raises ValueError if there are none left."""
        taken = {}
        for name, num in counts.items():
            rows, start = self._arrays.get(name, np.empty(0)), self._num_taken[name]
            if type(num) is not int or not 0 <= num <= len(rows) - start:
                raise ValueError(f"stream {name}: rows needed: {start} + {num}, found: {len(rows)}")
            taken[name] = rows[start : start + num]
            self._num_taken[name] += num
        return taken

    def check_empty(self) -> None:
        """Raise ValueError if rows are left that were not taken."""
        for name, rows in self._arrays.items():
            if len(rows) != self._num_taken[name]:
                raise ValueError(f"stream {name}: rows needed: {self._num_taken[name]}, found: {len(rows)}")


def encoded_rows(rows: Array) -> list[Any] | str:
    """Encode rows losslessly for JSON: as numbers if each row is one number, otherwise as base64 of the bytes."""
    if rows.ndim == 1:
        return rows.tolist()
    import pybase64

    return pybase64.b64encode_as_string(rows.tobytes())


def read_only(array: Array) -> Array:
    """Make the array read-only, and return it."""
    array.flags.writeable = False
    return array
