"""Turns between tokens and text, and the tokens of an environment's answer."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.encoding import words_ids
from bapo_megatron.prompts.stop_tokens import chat_of
from bapo_megatron.prompts.tools import ToolOptions
from bapo_megatron.rewards.environments import Continue, Environment, EnvironmentSpec, TurnJson
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from bapo_megatron.rollout.agents import AgentDriver, AgentPrograms
from bapo_megatron.rollout.drivers import Answers, StepDriver


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """A tokenizer, as turns use it. What the policy sampled is never tokenised again."""

    tokenizer: Any
    vocab_size: int  # the model's
    chat: Continuation | None = None  # None: prompts are not in a chat template

    @classmethod
    def of(cls, config: Config, tokenizer: Any, vocab_size: int) -> "TurnTokens":
        """Return the tokens of [environment]'s turns. Raises UserError like `check_tools`."""
        is_chat = config.environment.is_used and config.data.chat_template
        check_tools(config, tokenizer)
        return cls(tokenizer, vocab_size, chat_of(config, tokenizer) if is_chat else None)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def encode(self, answer: Continue, turn: TurnJson, max_tokens: int) -> tuple[list[int], bool]:
        """Return the tokens of an environment's answer to a turn, and whether it was cut to `max_tokens`.

        Special tokens that its words spell stay text: they forge no turn.

        Raises:
            ValueError: a token is not in the model's vocabulary, or the chat template does not take the messages.
        """
        if answer.messages is not None:
            if self.chat is None:
                raise ValueError(
                    "a step returned messages, but the prompts are not in a chat template: set data.chat_template = "
                    "true, or return text"
                )
            is_cut = turn["end"] == "length"
            return self.chat.ids(answer.messages, turn["token_ids"], is_cut=is_cut, max_tokens=max_tokens)
        if answer.token_ids is None:
            token_ids = words_ids(self.tokenizer, answer.text or "")
        else:
            token_ids = list(answer.token_ids)
            if outside := [i for i in token_ids if not 0 <= i < self.vocab_size]:
                raise ValueError(f"token {outside[0]} is not in the model's vocabulary of {self.vocab_size}")
        return token_ids[:max_tokens], len(token_ids) > max_tokens


def check_tools(config: Config, tokenizer: Any) -> None:
    """Check that answers of tools can follow a turn. Raises UserError if the chat template does not take them."""
    options = ToolOptions.if_used(config.environment)
    if options is None or not config.data.chat_template:
        return
    if not tokenizer.chat_template:
        raise UserError("the model has no chat template, which the answers of tools need")
    chat = chat_of(config, tokenizer)
    if refusal := chat.refusal(options.role):
        other = "user" if options.role == "tool" else "tool"
        remedy = f'set environment.options.role = "{other}"' if chat.refusal(other) is None else "choose another model"
        raise UserError(f'environment.kind = "tools": {refusal}; {remedy}')


def environment_of(config: Config, output: int = 2) -> EnvironmentProcesses | AgentPrograms:
    """Start the environment that [environment] names; it prints to `output`. Raises UserError, WorkersError."""
    if config.environment.is_agent:
        return AgentPrograms(config)
    return EnvironmentProcesses(EnvironmentSpec.of(config), config.environment.concurrency, output)


def turn_driver(
    config: Config,
    environment: Environment | AgentPrograms,
    tokens: TurnTokens,
    max_response_tokens: int,
    scorer: RewardScorer | None = None,
) -> StepDriver | AgentDriver:
    """Return the driver of turns with the limits of [environment].

    Args:
        scorer: the judge of last turns, for tools and agents.
    """
    limits, answers = config.environment, Answers(scorer)
    if isinstance(environment, AgentPrograms):
        assert tokens.chat is not None, "preflight/checks/environment.py checks this"
        max_given_tokens = config.data.max_prompt_tokens + limits.max_given_tokens
        most = (max_response_tokens, max_given_tokens, limits.max_turns)
        chat = chat_of(config, copy.deepcopy(tokens.tokenizer))
        return AgentDriver(environment, chat, tokens.decode, *most, answers)
    most = (max_response_tokens, limits.max_answer_tokens, limits.max_turns)
    return StepDriver(environment, tokens.encode, tokens.decode, *most, answers)
