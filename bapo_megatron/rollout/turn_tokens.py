"""Turns between text and tokens: the tokens that end one, its text, and the tokens of an environment's answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError, plural
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.encoding import rendered_ids, words_ids
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
        return cls(tokenizer, vocab_size, _chat(config, tokenizer) if is_chat else None)

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
    chat = _chat(config, tokenizer)
    if refusal := chat.refusal(options.role):
        other = "user" if options.role == "tool" else "tool"
        remedy = f'set environment.options.role = "{other}"' if chat.refusal(other) is None else "choose another model"
        raise UserError(f'environment.kind = "tools": {refusal}; {remedy}')


def stop_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: the tokenizer's end of a sequence; with an environment, its stop_tokens and
    the end of a turn in the chat template, if prompts are in it.

    Raises:
        UserError: a stop token is not one token of the tokenizer.
    """
    stop_ids = [int(tokenizer.eos_token_id)]
    if config.environment.is_used:
        if config.data.chat_template and (end_id := _chat(config, tokenizer).end_id) is not None:
            stop_ids.append(end_id)
        stop_ids += [_one_token(tokenizer, name) for name in config.environment.stop_tokens]
    return tuple(dict.fromkeys(stop_ids))


def _chat(config: Config, tokenizer: Any) -> Continuation:
    return Continuation(tokenizer, config.data.template_options)


def _one_token(tokenizer: Any, name: str) -> int:
    token_id = tokenizer.get_vocab().get(name)
    if token_id is not None:
        return int(token_id)
    found = rendered_ids(tokenizer, name)
    if len(found) != 1 or found[0] == tokenizer.unk_token_id:
        what = "unknown to" if tokenizer.unk_token_id in found else f"{plural(len(found), 'token')} of"
        raise UserError(
            f"environment.stop_tokens: {name!r} is {what} the model's tokenizer; a turn ends at a single token, such "
            f"as {tokenizer.eos_token!r}"
        )
    return int(found[0])


def environment_of(config: Config) -> EnvironmentProcesses | AgentPrograms:
    """Start the environment that [environment] names. Raises UserError, RuntimeError."""
    if config.environment.is_agent:
        return AgentPrograms(config)
    return EnvironmentProcesses(EnvironmentSpec.of(config), config.environment.concurrency)


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
        return AgentDriver(environment, tokens.chat, tokens.decode, *most, answers)
    most = (max_response_tokens, limits.max_answer_tokens, limits.max_turns)
    return StepDriver(environment, tokens.encode, tokens.decode, *most, answers)
