"""An endless, resumable stream of tokenised prompts."""

from __future__ import annotations

import random
from typing import Any

from transformers import PreTrainedTokenizerBase

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, DataError
from bapo_megatron.prompts.base import PromptSource, Question
from bapo_megatron.prompts.chains import ChainSource
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.programs import ProgramSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource
from bapo_megatron.types import Prompt


def build_source(config: Config) -> PromptSource:
    """The source that `[data]` describes. Raises DataError."""
    data, seed = config.data, config.run.seed
    match data.source:
        case "chains":
            return ChainSource(data.size, seed, data.options)
        case "programs":
            return ProgramSource(data.size, seed, data.options)
        case "reasoning_gym":
            return ReasoningGymSource(data.dataset, data.size, seed, data.options)
        case "jsonl":
            return JsonlSource(data.path, data.format)


class PromptStream:
    """Prompts in a new random order each epoch; order and content depend on the configuration only.

    An empty or over-long prompt raises DataError naming it or, with data.on_bad_prompt = "skip", is passed over and
    counted in `skipped_empty` or `skipped_too_long`.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.data, self.seed = config.data, config.run.seed
        self.tokenizer = tokenizer
        self.source = build_source(config)
        self.skipped_empty = 0
        self.skipped_too_long = 0
        self._epoch = 0
        self._position = 0  # in this epoch's order
        self._next_id = 0
        self._order = self._shuffled()
        if self.data.chat_template and not tokenizer.chat_template:
            raise DataError("data.chat_template = true, but the model's tokenizer has no chat template")
        if self.data.system_prompt is not None and not self.data.chat_template:
            raise DataError("data.system_prompt is used by the chat template only: set data.chat_template = true")

    def next(self) -> Prompt:
        """The next good prompt. Raises DataError for a bad one (see class), or if there is no good one at all."""
        for _ in range(2 * len(self.source)):  # the rest of this epoch, and all of the next
            if (prompt := self._prompt(self._advance(), self._next_id)) is not None:
                self._next_id += 1
                return prompt
        raise DataError(
            f"{self.source.name}: none of its {len(self.source)} prompts can be used (counted over the run: "
            f"{self.skipped_empty} empty, {self.skipped_too_long} over data.max_prompt_tokens)"
        )

    def in_order(self, limit: int | None = None) -> list[Prompt]:
        """The good ones among the source's first `limit` prompts, once each; a prompt's number is its index there.

        Raises DataError for a bad one (see class), or if there is no good one at all.
        """
        indices = range(len(self.source) if limit is None else min(limit, len(self.source)))
        prompts = [p for i in indices if (p := self._prompt(self.source[i], i)) is not None]
        if not prompts:
            raise DataError(f"{self.source.name}: none of its first {len(indices)} prompts can be used")
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: all that is needed to go on with the very next prompt."""
        return {
            **self._identity(),
            "epoch": self._epoch,
            "position": self._position,
            "next_id": self._next_id,
            "skipped_empty": self.skipped_empty,
            "skipped_too_long": self.skipped_too_long,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises CheckpointError if it is of another source, size or seed."""
        for key, here in self._identity().items():
            if state[key] != here:
                raise CheckpointError(
                    f"the checkpoint's prompts had {key} = {state[key]!r}, this run has {here!r}: "
                    "keep the setting, or start a run with a new name"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._next_id = state["next_id"]
        self.skipped_empty, self.skipped_too_long = state["skipped_empty"], state["skipped_too_long"]
        self._order = self._shuffled()

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
        """None for a bad one that is to be skipped."""
        if not question.text.strip():
            self.skipped_empty += 1
            self._bad_prompt(f"{question.where}: the prompt is empty")
            return None
        token_ids = self._tokenise(question)
        if len(token_ids) > self.data.max_prompt_tokens:
            self.skipped_too_long += 1
            self._bad_prompt(
                f"{question.where}: the prompt has {len(token_ids)} tokens, more than "
                f"data.max_prompt_tokens = {self.data.max_prompt_tokens}"
            )
            return None
        return Prompt(prompt_id, token_ids, question.text, question.answer, self.source.name)

    def _bad_prompt(self, message: str) -> None:
        if self.data.on_bad_prompt == "error":
            raise DataError(f'{message}; mend it, or set data.on_bad_prompt = "skip"')

    def _tokenise(self, question: Question) -> tuple[int, ...]:
        if not self.data.chat_template:
            return tuple(self.tokenizer.encode(question.text))
        messages = [{"role": "user", "content": question.text}]
        if self.data.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.data.system_prompt})
        # return_dict=False: token ids alone, whatever the transformers version's default
        return tuple(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )
