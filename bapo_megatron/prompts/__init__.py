"""Prompt sources (chains, programs, reasoning-gym, rows) and resumable streams over them."""

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import PromptSource
from bapo_megatron.prompts.chains import ChainSource
from bapo_megatron.prompts.jsonl import row_source
from bapo_megatron.prompts.programs import ProgramSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource


def build_source(config: Config, table: str = "data") -> PromptSource:
    """Build the source that `[data]` describes.

    Raises DataError, which names `table` as the place of its settings, or UserError for the user's own function.
    """
    data, seed = config.data, config.run.seed
    if data.has_rows:
        return row_source(data, table, skips_empty=data.on_bad_prompt == "skip")
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
