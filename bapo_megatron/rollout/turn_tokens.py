"""Turns between text and tokens: the tokens that end one, its text, and the tokens of an environment's answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError, plural
from bapo_megatron.rewards.environments import Continue, Environment, EnvironmentSpec
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from bapo_megatron.rollout.drivers import StepDriver


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """A tokenizer, as turns use it. What the policy sampled is never tokenised again."""

    tokenizer: Any
    vocab_size: int  # the model's

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def encode(self, answer: Continue) -> list[int]:
        """Return the tokens of an environment's answer. A special token that a text spells stays text: it forges no
        turn.

        Raises:
            ValueError: a token is not in the model's vocabulary.
        """
        if answer.token_ids is not None:
            if outside := [i for i in answer.token_ids if not 0 <= i < self.vocab_size]:
                raise ValueError(f"token {outside[0]} is not in the model's vocabulary of {self.vocab_size}")
            return list(answer.token_ids)
        return self.tokenizer(answer.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def stop_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: the tokenizer's end of a sequence, and environment.stop_tokens.

    Raises:
        UserError: a stop token is not one token of the tokenizer.
    """
    names = config.environment.stop_tokens if config.environment.is_used else ()
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *(_one_token(tokenizer, name) for name in names)]))


def _one_token(tokenizer: Any, name: str) -> int:
    token_id = tokenizer.get_vocab().get(name)
    if token_id is not None:
        return int(token_id)
    found = tokenizer.encode(name, add_special_tokens=False)
    if len(found) != 1 or found[0] == tokenizer.unk_token_id:
        what = "unknown to" if tokenizer.unk_token_id in found else f"{plural(len(found), 'token')} of"
        raise UserError(
            f"environment.stop_tokens: {name!r} is {what} the model's tokenizer; a turn ends at a single token, such "
            f"as {tokenizer.eos_token!r}"
        )
    return int(found[0])


def environment_of(config: Config) -> EnvironmentProcesses:
    """Start the environment that [environment] names. Raises UserError, RuntimeError."""
    return EnvironmentProcesses(EnvironmentSpec.of(config), config.environment.concurrency)


def step_driver(config: Config, environment: Environment, tokens: TurnTokens, max_response_tokens: int) -> StepDriver:
    """Return the driver of turns with the limits of [environment]."""
    limits = config.environment
    return StepDriver(
        environment, tokens.encode, tokens.decode, max_response_tokens, limits.max_answer_tokens, limits.max_turns
    )
