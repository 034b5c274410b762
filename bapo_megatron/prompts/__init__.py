"""Prompt sources (chains, programs, reasoning-gym, rows) and resumable streams over them.

Start at `build_source`. Worker processes import this file on the way to tool_calls.py, so it imports the sources only
when it builds one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bapo_megatron.errors import DataError

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.prompts.base import PromptSource


def build_source(config: Config, table: str = "data") -> PromptSource:
    """Build the source that `[data]` describes.

    Raises DataError, which names `table` as the place of its settings, or UserError for the user's own function.
    """
    from bapo_megatron.prompts.chains import ChainSource
    from bapo_megatron.prompts.jsonl import row_source
    from bapo_megatron.prompts.programs import ProgramSource
    from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource

    data, seed = config.data, config.run.seed
    if data.has_rows:
        needs_answers = config.reward.is_given
        return row_source(data, table, skips_empty=data.on_bad_prompt == "skip", needs_answers=needs_answers)
    try:
        match data.source:
            case "chains":
                return ChainSource(data.size, seed, data.options)
            case "programs":
                return ProgramSource(data.size, seed, data.options)
            case _:
                return ReasoningGymSource(data.dataset, data.size, seed, data.options)
    except DataError as error:
        if table == "data":
            raise
        raise DataError(f"{table}: {error}") from error
