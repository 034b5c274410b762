"""Checks of the environment that answers the policy's turns."""

from collections.abc import Iterator
from typing import Any

from bapo_megatron.config.base import Violation
from bapo_megatron.config.schema import Config


def check_environment(config: Config, hf_config: dict[str, Any] | None) -> Iterator[Violation]:
    """Check the limits of turns against responses and the model's longest sequence."""
    one, responses = config.environment, config.rollout.max_response_tokens
    if one.turn_limit is not None and one.turn_limit > responses:
        yield Violation(
            ("environment.max_turn_tokens", "environment.kind", "rollout.max_response_tokens"),
            f"environment.max_turn_tokens={one.turn_limit} is more than rollout.max_response_tokens={responses}, which "
            "counts the policy's tokens of all turns",
            "set it below that, or leave it out",
        )
    if one.kind == "tools" and not config.data.chat_template:
        yield Violation(
            ("environment.kind", "data.chat_template"),
            'environment.kind="tools" answers with messages, which need data.chat_template=true',
            "set it, or write a step function that reads calls and returns text",
        )
    if one.is_agent and not config.data.chat_template:
        yield Violation(
            ("data.chat_template", "environment.kind"),
            'environment.kind="agent": what a program asks comes in the model\'s chat template',
            "set data.chat_template=true",
        )
    positions = (hf_config or {}).get("max_position_embeddings")
    longest, given = config.longest_sequence, one.max_given_tokens
    if isinstance(positions, int) and longest - given <= positions < longest:
        room = (positions - longest + given) // (one.max_turns - 1)
        yield Violation(
            (
                "environment.max_answer_tokens",
                "environment.max_turns",
                "environment.kind",
                "data.max_prompt_tokens",
                "rollout.max_response_tokens",
                "eval.sets",
                "eval.interval_steps",
                "model.path",
            ),
            f"prompt and response of {longest - given} tokens with {one.max_turns} - 1 answers of "
            f"environment.max_answer_tokens={one.max_answer_tokens} make {longest}, more than the model's "
            f"max_position_embeddings={positions}",
            f"set environment.max_answer_tokens={room}" if room else "set environment.max_turns lower",
        )
