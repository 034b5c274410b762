"""The tokens that end a turn: one answer for training, evaluation, `bapo serve` and `bapo chat`, on every engine."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import UserError, plural
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.encoding import rendered_ids


def chat_of(config: Config, tokenizer: Any) -> Continuation:
    """Return the model's chat template with a configuration's options and time."""
    now = config.data.template_time
    return Continuation(tokenizer, config.data.template_options, None if now is None else datetime.fromisoformat(now))


def stop_token_ids(config: Config, tokenizer: Any, end_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that end a turn: `end_ids`; the end of a turn in the chat template, if prompts are in it; with
    an environment, its stop_tokens; but none of rollout.ignore_stop_tokens.

    Args:
        end_ids: what the model's files name, see `end_token_ids`.

    Raises:
        UserError: a setting names no single token of the tokenizer, or nothing to leave out; or no token is left.
    """
    stop_ids = [*end_ids]
    if config.data.chat_template and (end_id := chat_of(config, tokenizer).end_id) is not None:
        stop_ids.append(end_id)
    if config.environment.is_used:
        stop_ids += [_one_token(tokenizer, name, "environment.stop_tokens") for name in config.environment.stop_tokens]
    for name in config.rollout.ignore_stop_tokens:
        if (ignored := _one_token(tokenizer, name, "rollout.ignore_stop_tokens")) not in stop_ids:
            known = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in dict.fromkeys(stop_ids))
            raise UserError(f"rollout.ignore_stop_tokens: {name!r} ends no turn; these do: {known or 'none'}")
        stop_ids = [token_id for token_id in stop_ids if token_id != ignored]
    if not stop_ids:
        raise UserError(
            "no token ends a response, so each would run to rollout.max_response_tokens: set eos_token_id in the "
            "model's generation_config.json, or eos_token in its tokenizer_config.json"
            + ("; or leave less in rollout.ignore_stop_tokens" if config.rollout.ignore_stop_tokens else "")
        )
    return tuple(dict.fromkeys(stop_ids))


def _one_token(tokenizer: Any, name: str, setting: str) -> int:
    token_id = tokenizer.get_vocab().get(name)
    if token_id is not None:
        return int(token_id)
    found = rendered_ids(tokenizer, name)
    if len(found) != 1 or found[0] == tokenizer.unk_token_id:
        what = "unknown to" if tokenizer.unk_token_id in found else f"{plural(len(found), 'token')} of"
        raise UserError(
            f"{setting}: {name!r} is {what} the model's tokenizer; a turn ends at a single token, such as "
            f"{tokenizer.eos_token or '?'!r}"
        )
    return int(found[0])
