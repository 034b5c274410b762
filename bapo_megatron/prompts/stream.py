"""An endless, resumable stream of tokenised prompts."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NotRequired

from typing_extensions import TypedDict

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, DataError, plural
from bapo_megatron.prompts import build_source
from bapo_megatron.prompts.base import PromptSource, Question
from bapo_megatron.prompts.continuation import Continuation, Message
from bapo_megatron.prompts.encoding import is_template_option, prompt_ids
from bapo_megatron.prompts.jsonl import MAX_PROBLEM_CHARS
from bapo_megatron.prompts.messages import as_taken, is_needed, left_out
from bapo_megatron.prompts.stop_tokens import chat_of
from bapo_megatron.prompts.tools import ToolOptions
from bapo_megatron.types import Natural, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_CHECKED = 256
"""Prompts that `PromptStream.check` makes of a procedural source."""
_NUM_DIGESTED = 16
"""Prompts of a procedural source that `PromptStream.digests` makes."""
_MAX_NAMED = 5  # bad prompts that one message names
_DRAWS = re.compile(r"\|\s*random\b|\bmap\(\s*['\"]random['\"]|\blipsum\s*\(")
"""What draws at random in jinja: a filter, also by its name, and a maker of texts."""
_NUMBER = re.compile(r"\[\d+\]")  # the number that a call has in a field's name
_MAX_TOKEN_CHARS = 512
"""More characters than any tokenizer has in a token; a text of 60 MB would take it a minute, and 4 GiB of memory."""
_SOME = (0,)  # stands for the tokens of a prompt that is far too long
_ADVICE = 'correct it, or set data.on_bad_prompt = "skip"'


class StreamState(TypedDict):
    """The state of a `PromptStream` in a checkpoint."""

    source: str
    size: Natural
    seed: int
    epoch: Natural
    position: Natural
    next_id: Natural
    skipped_empty: Natural
    skipped_too_long: Natural
    skipped_refused: NotRequired[Natural]  # missing in older checkpoints


def question_ids(
    question: Question,
    tokenizer: PreTrainedTokenizerBase,
    chat: Continuation | None,
    system_prompt: str | None,
    tools: Sequence[Message] = (),
) -> list[int]:
    """Return the tokens of a question as a prompt: plain, or in a chat template.

    Raises:
        DataError: the template refuses the messages, or the text is not valid Unicode; names the row.
    """
    if chat is None:
        try:
            return prompt_ids(tokenizer, question.text)
        except ValueError as problem:
            raise DataError(f"{question.where}: {problem}") from problem
    messages = as_taken(question.conversation(system_prompt), tools, chat.text)
    try:
        return chat.whole(messages, tools)
    except ValueError as problem:
        advice = ""
        others = [message for message in messages if message["role"] not in ("system", "developer")]
        if 0 < len(others) < len(messages) and chat.takes(others, tools):
            is_own = len(question.conversation(None)) != len(others)
            where = "the system message out, and its words into another" if is_own else "data.system_prompt out"
            advice = f"; without the system message it takes them: leave {where}"
        raise DataError(f"{question.where}: {problem}{advice}") from problem


def too_many_chars(question: Question, max_tokens: int) -> int:
    """Return the number of a prompt's characters if a tokenizer need not be asked whether it is too long, or 0."""
    num_chars = max(len(question.text), sum(len(message["content"]) for message in question.messages))
    return num_chars if num_chars > _MAX_TOKEN_CHARS * max_tokens else 0


class PromptStream:
    """Prompts in a new random order each epoch; order and content depend only on the configuration.

    A prompt that is empty, over-long or refused by the chat template raises DataError or, with data.on_bad_prompt =
    "skip", counts in `skipped_empty`, `skipped_too_long` or `skipped_refused`. It also counts as refused if the
    template does not show a field without which it means something else. Other fields that the template does not show
    are in `left_out`, by the number of prompts that have them.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, source: PromptSource | None = None) -> None:
        """Use `source` if given; otherwise build it."""
        self.data, self.seed = config.data, config.run.seed
        self.tokenizer = tokenizer
        self.source = build_source(config) if source is None else source
        self.skipped_empty = 0
        self.skipped_too_long = 0
        self.skipped_refused = 0
        self.left_out: Counter[str] = Counter()
        self._left_out_by_kind: dict[Any, tuple[str, ...]] = {}  # by `_kind` of all its parts
        self._epoch = 0
        self._position = 0  # in this epoch's order
        self._next_id = 0
        self._order = self._shuffled()
        if self.data.chat_template and not tokenizer.chat_template:
            raise DataError("data.chat_template = true, but the model's tokenizer has no chat template")
        if self.data.only_in_template and not self.data.chat_template:
            name = self.data.only_in_template[0]
            raise DataError(f"{name} is used by the chat template only: set data.chat_template = true")
        for name in self.data.template_options:
            if not is_template_option(tokenizer, name):
                raise DataError(f"data.template_options: the model's chat template has no option {name!r}")
        if self.data.chat_template and (draws := _DRAWS.search(str(tokenizer.chat_template))) is not None:
            raise DataError(
                f"the model's chat template draws at random ({draws[0]}), so that a resumed run would get other "
                "prompts; remove this from the template (chat_template.jinja or tokenizer_config.json)"
            )
        self._chat = chat_of(config, tokenizer) if self.data.chat_template else None
        tools = ToolOptions.if_used(config.environment) if self.data.chat_template else None
        self._tools = [] if tools is None else tools.shown(tokenizer, self.data.template_options)

    @property
    def num_given(self) -> int:
        """Good prompts that `next` has returned since the run began."""
        return self._next_id

    @property
    def num_skipped(self) -> int:
        """Prompts skipped as empty, too long or refused since the run began."""
        return self.skipped_empty + self.skipped_too_long + self.skipped_refused

    def next(self) -> Prompt:
        """Return the next good prompt. Raises DataError for a bad one (see class), or if none is good."""
        for _ in range(2 * len(self.source)):  # covers the rest of this epoch and all of the next
            if (prompt := self._prompt(self._advance(), self._next_id)) is not None:
                self._next_id += 1
                return prompt
        raise DataError(
            f"{self.source.name}: none of its {plural(len(self.source), 'prompt')} can be used (in this run: "
            f"{self.skipped_empty} empty, {self.skipped_too_long} over data.max_prompt_tokens, {self.skipped_refused} "
            "refused by the chat template)"
        )

    def reworded(self, prompt: Prompt, words: Callable[[str], str]) -> list[int]:
        """Return the tokens of a prompt of this stream with other words in the user's last message.

        A `Prompt` does not tell the messages and tools of its row, which is found by the tokens that it gives.

        Args:
            words: maps the message's own words to the new ones.

        Raises DataError if no row gives these tokens, or like `Question.reworded`.
        """
        where = f"prompt {prompt.prompt_id} of {prompt.source}"
        rows = (self.source[i] for i in self._conversations.get(prompt.text, ()))
        for question in (*rows, Question(prompt.text, prompt.answer, where)):
            if self._tokens(question) == [*prompt.token_ids]:
                return self._tokens(question.reworded(words))
        raise DataError(f"no row gives the tokens of {where}, whose words are to be replaced; has the data changed?")

    def lengths_reworded(self, words: Callable[[Question, str], str]) -> Iterator[tuple[int, str]]:
        """Yield each row's number of tokens with other words, and where the row is.

        Rows that a run leaves out are skipped, and a procedural source gives a sample. Call `check` first.

        Args:
            words: see `reworded`, of each row.

        Raises DataError like `Question.reworded`.
        """
        for question in (self.source[i] for i in self._checked_places):
            if self.data.on_bad_prompt == "error" or self._tokenise(question)[1] is None:
                yield len(self._tokens(question.reworded(partial(words, question)))), question.where

    @property
    def _checked_places(self) -> range:
        size = len(self.source)
        return range(0, size, 1 if self.data.has_rows else math.ceil(size / NUM_CHECKED))

    @cached_property
    def _conversations(self) -> dict[str, list[int]]:
        """The places of rows with messages or tools of their own, by text."""
        found: dict[str, list[int]] = defaultdict(list)
        for i in range(len(self.source)) if self.data.has_rows else ():
            question = self.source[i]
            if question.messages or question.tools:
                found[question.text].append(i)
        return found

    def check(self, places: Iterable[int] | None = None) -> list[str]:
        """Look for bad prompts before a run starts: in all rows, or in a sample of a procedural source.

        Args:
            places: check only these prompts, also if bad ones are left out.

        Returns why prompts of these places are left out.

        Raises DataError with the first bad prompts and the number of all, if data.on_bad_prompt = "error" or all are
        bad; or if a prompt is a conversation or has tools, and this run cannot show them.
        """
        for i in range(len(self.source)) if self.data.has_rows else ():
            self._tools_of(self.source[i])
        if self.data.on_bad_prompt == "skip" and places is None:
            return []
        read = [*(self._checked_places if places is None else places)]
        tokenised = (self._tokenise(self.source[i]) for i in read)
        found = [(bool(token_ids), problem) for token_ids, problem in tokenised if problem is not None]
        problems = [f"{problem:.{MAX_PROBLEM_CHARS}}" for _, problem in found]
        are_all = len(problems) == len(self.source)
        if problems and (self.data.on_bad_prompt == "error" or are_all):
            others = f" ({len(problems)} of {len(read)} prompts are empty, too long or refused)"
            first = "; ".join(problems[:_MAX_NAMED])
            limit = " or data.max_prompt_tokens" if any(is_too_long for is_too_long, _ in found) else ""
            advice = f"correct them{limit}: all would be left out" if are_all else _ADVICE
            raise DataError(f"{first}{others if len(problems) > 1 else ''}; {advice}")
        return problems

    def digests(self, table: str = "data") -> dict[str, str]:
        """Return the SHA-256 of all rows, or of a sample of a procedural source, by table and origin.

        A row counts as it is read: text, messages, answer and tools. Example: {"data (openai/gsm8k)": "1f0c..."}
        """
        size, found = len(self.source), hashlib.sha256()
        for i in range(0, size, 1 if self.data.has_rows else math.ceil(size / _NUM_DIGESTED)):
            question = self.source[i]
            row = [question.text, question.answer, question.messages, question.tools]
            found.update(json.dumps(row).encode() + b"\n")
        return {f"{table} ({self.data.origin})": found.hexdigest()}

    def in_order(self, limit: int | None = None) -> list[Prompt]:
        """Return the good prompts among the source's first `limit`; a prompt's id is its index there.

        Raises DataError for a bad one (see class), or if none is good.
        """
        indices = range(len(self.source) if limit is None else min(limit, len(self.source)))
        prompts = [p for i in indices if (p := self._prompt(self.source[i], i)) is not None]
        if not prompts:
            raise DataError(f"{self.source.name}: none of its first {plural(len(indices), 'prompt')} can be used")
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON value from which a stream continues with the very next prompt."""
        return {
            **self._identity(),
            "epoch": self._epoch,
            "position": self._position,
            "next_id": self._next_id,
            "skipped_empty": self.skipped_empty,
            "skipped_too_long": self.skipped_too_long,
            "skipped_refused": self.skipped_refused,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `StreamState` was taken. Raises CheckpointError for another source, size or seed."""
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise CheckpointError(
                    f"the checkpoint's prompts had {key} = {state.get(key)!r}, but this run has {here!r}: "
                    "keep the prompts, or continue the run with them by `bapo branch`"
                )
        if state["position"] > len(self.source):
            raise CheckpointError(f"the checkpoint's prompts are at {state['position']} of {len(self.source)}")
        self._epoch, self._position = state["epoch"], state["position"]
        self._next_id = state["next_id"]
        self.skipped_empty, self.skipped_too_long = state["skipped_empty"], state["skipped_too_long"]
        self.skipped_refused = state.get("skipped_refused", 0)
        self._order = self._shuffled()

    def begin_after(self, num_given: int) -> None:
        """Count prompts from `num_given` on, so that a branch with other prompts uses no id twice."""
        self._next_id = num_given

    def _identity(self) -> dict[str, Any]:
        return {"source": self.source.name, "size": len(self.source), "seed": self.seed}

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.source)))
        random.Random(f"prompt order/{self.seed}/{self._epoch}").shuffle(order)
        return order

    def _advance(self) -> Question:
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        question = self.source[self._order[self._position]]
        self._position += 1
        return question

    def _prompt(self, question: Question, prompt_id: int) -> Prompt | None:
        """Tokenise a question; return None for a bad one to skip."""
        token_ids, problem = self._tokenise(question)
        if problem is None:
            return Prompt(prompt_id, token_ids, question.text, question.answer, self.source.name)
        if self.data.on_bad_prompt == "error":
            raise DataError(f"{problem}; {_ADVICE}")
        is_empty = not question.text.strip()
        self.skipped_empty += is_empty
        self.skipped_too_long += bool(token_ids)
        self.skipped_refused += not is_empty and not token_ids
        return None

    def _tokens(self, question: Question) -> list[int]:
        tools = self._tools_of(question)
        return question_ids(question, self.tokenizer, self._chat, self.data.system_prompt, tools)

    def _tokenise(self, question: Question) -> tuple[tuple[int, ...], str | None]:
        """Return the prompt's token ids and its problem, if any; no ids for an empty or refused prompt."""
        if not question.text.strip():
            return (), f"{question.where}: the prompt is empty"
        limit, tools = self.data.max_prompt_tokens, self._tools_of(question)
        if num_chars := too_many_chars(question, limit):
            problem = f"the prompt has {num_chars:,} characters, too many for data.max_prompt_tokens = {limit}"
            return _SOME, f"{question.where}: {problem}"
        try:
            token_ids = tuple(question_ids(question, self.tokenizer, self._chat, self.data.system_prompt, tools))
            not_shown = () if self._chat is None else self._not_shown(question, tools, self._chat)
        except DataError as refusal:
            return (), str(refusal)
        self.left_out.update(not_shown)
        if len(token_ids) > limit:
            with_tools = " with its tools" if tools else ""
            problem = f"the prompt has {len(token_ids)} tokens{with_tools}, more than data.max_prompt_tokens = {limit}"
            return token_ids, f"{question.where}: {problem}"
        return token_ids, None

    def _tools_of(self, question: Question) -> Sequence[Message]:
        """Return a row's own tools, or the environment's. Raises DataError for what this run cannot show."""
        if (question.messages or question.tools) and self._chat is None:
            what, how = "is a conversation" if question.messages else "has tools", "set data.chat_template = true"
            if not self.tokenizer.chat_template:
                how = "the model has no chat template: write it as one text, or choose a model that was trained to chat"
            raise DataError(f"{question.where}: the prompt {what}; {how}")
        if question.tools and self._tools:
            raise DataError(
                f"{question.where}: the prompt has tools of its own, and environment.options.tools offers others; "
                "remove the rows' tools, or the environment's tools"
            )
        return question.tools or self._tools

    def _not_shown(self, question: Question, tools: Sequence[Message], chat: Continuation) -> tuple[str, ...]:
        """Return fields of a conversation that the chat template does not show, each once.

        Raises DataError if the prompt means something else without one.
        """
        written = question.conversation(self.data.system_prompt)
        kind = (bool(question.messages), *map(_kind, written), *(_kind(tool["function"]) for tool in question.tools))
        if kind in self._left_out_by_kind:
            return self._left_out_by_kind[kind]
        messages = as_taken(written, tools, chat.text)
        num_before = len(messages) - max(len(question.messages), 1)  # 1: the system prompt
        found: list[str] = []
        for field, place in left_out(messages, question.tools, chat.text):
            is_tool = field.startswith("tools.")
            if is_needed(field):
                role = "" if is_tool else messages[place]["role"]
                owner = f"tool {place + 1}" if is_tool else f"message {place + 1 - num_before} ({role})"
                what = "data.system_prompt" if place < num_before and not is_tool else f"{field} of {owner}"
                raise DataError(
                    f"{question.where}: the model's chat template does not show {what}; write it as text of a message "
                    "that it shows, leave it out, or choose another model"
                )
            found.append(_NUMBER.sub("", field))
        self._left_out_by_kind[kind] = tuple(dict.fromkeys(found))
        return self._left_out_by_kind[kind]


def _kind(value: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides whether a template shows a message or a tool: its role, and which fields say something."""
    calls = tuple(_kind(call["function"]) for call in value.get("tool_calls", ()))
    return value.get("role"), *(key for key, item in value.items() if item or key == "role"), calls
