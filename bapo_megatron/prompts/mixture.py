"""Several prompt streams as one, mixed by weight: [[data.sources]].

For every n, a source with share p of the weights gives more than np - 1 and fewer than np + 1 of the first n prompts.
The order of the sources depends only on the weights; only the order of each source's own prompts is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag
from typing_extensions import TypedDict

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError
from bapo_megatron.prompts import build_source
from bapo_megatron.prompts.base import Question
from bapo_megatron.prompts.stream import PromptStream, StreamState
from bapo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MixtureState(TypedDict):
    """The state of a `PromptMixture` in a checkpoint."""

    weights: dict[str, float]
    streams: dict[str, StreamState]


def _kind_of_prompts(state: Any) -> str:
    return "mixed" if isinstance(state, dict) and "streams" in state else "single"


PromptsState = Annotated[
    Annotated[StreamState, Tag("single")] | Annotated[MixtureState, Tag("mixed")], Discriminator(_kind_of_prompts)
]
"""The state of the training prompts in a checkpoint."""


class PromptMixture:
    """The streams of [[data.sources]]. A prompt's source is its entry's name; ids are counted over all sources.

    Raises DataError for a source that cannot be read, and in `next` and `check` like `PromptStream`.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self._weights = {one.name: one.weight for one in config.data.sources}
        exact = {name: Fraction(repr(weight)) for name, weight in self._weights.items()}  # 0.1 is exactly a tenth
        self._shares = {name: weight / sum(exact.values()) for name, weight in exact.items()}
        self._streams: dict[str, PromptStream] = {}
        for one in config.data.sources:
            alone = config.with_prompts_of(one)
            source = build_source(alone, f"data.sources.{one.name}")
            self._streams[one.name] = PromptStream(alone, tokenizer, source)

    @property
    def num_skipped(self) -> int:
        """Prompts skipped as empty, too long or refused since the run began."""
        return sum(stream.num_skipped for stream in self._streams.values())

    def next(self) -> Prompt:
        """Return the next good prompt, from the source whose turn it is."""
        prompt_id = self.num_given
        name = self._whose_turn(prompt_id)
        prompt = self._streams[name].next()
        return Prompt(prompt_id, prompt.token_ids, prompt.text, prompt.answer, name)

    def reworded(self, prompt: Prompt, words: Callable[[str], str]) -> list[int]:
        """Return the tokens of a prompt with other words; see `PromptStream.reworded`."""
        return self._streams[prompt.source].reworded(prompt, words)

    def lengths_reworded(self, words: Callable[[Question, str], str]) -> Iterator[tuple[int, str]]:
        """Yield the lengths of the rows of every source; see `PromptStream.lengths_reworded`."""
        return chain.from_iterable(stream.lengths_reworded(words) for stream in self._streams.values())

    def check(self) -> None:
        """Find bad prompts of every source before a run starts; see `PromptStream.check`."""
        for stream in self._streams.values():
            stream.check()

    def digests(self) -> dict[str, str]:
        """Return the digests of every source; see `PromptStream.digests`."""
        tables = {f"data.sources.{name}": stream for name, stream in self._streams.items()}
        return {name: digest for table, stream in tables.items() for name, digest in stream.digests(table).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value from which a mixture continues with the very next prompt."""
        return {
            "weights": self._weights,
            "streams": {name: stream.state_dict() for name, stream in self._streams.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `MixtureState` was taken. Raises CheckpointError for other sources or weights."""
        if (weights := state.get("weights")) != self._weights:
            before = f"the weights {weights}" if weights else "a single source"
            raise CheckpointError(
                f"the checkpoint's prompts had {before}, but this run's data.sources have {self._weights}: keep the "
                "setting, or continue the run with them by `bapo branch`"
            )
        for name, stream in self._streams.items():
            stream.load_state_dict(state["streams"][name])

    @property
    def num_given(self) -> int:
        """Good prompts that `next` has returned since the run began."""
        return sum(stream.num_given for stream in self._streams.values())

    def begin_after(self, num_given: int) -> None:
        """Count prompts from `num_given` on, as if each source had given its share of them."""
        for prompt_id in range(num_given):
            stream = self._streams[self._whose_turn(prompt_id)]
            stream.begin_after(stream.num_given + 1)

    def _whose_turn(self, num_given: int) -> str:
        """Return the source of prompt number `num_given`, by Balinski and Young's quota method.

        Among the sources that have not used up their share of the prompts up to that one, it is the source that would
        be the first to fall a whole prompt behind.
        """
        due = {
            name: (stream.num_given + 1) / self._shares[name]
            for name, stream in self._streams.items()
            if stream.num_given < self._shares[name] * (num_given + 1)
        }
        return min(due, key=lambda name: due[name])


def prompts_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptStream | PromptMixture:
    """Return the training prompts."""
    return PromptMixture(config, tokenizer) if config.data.sources else PromptStream(config, tokenizer)
