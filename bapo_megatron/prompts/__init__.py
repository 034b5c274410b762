"""Prompt sources (chains, programs, reasoning-gym, JSONL) and the resumable streams over them."""

from bapo_megatron.config.schema import Config
from bapo_megatron.errors import DataError
from bapo_megatron.prompts.base import PromptSource
from bapo_megatron.prompts.chains import ChainSource
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.programs import ProgramSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource


def build_source(config: Config, table: str = "data") -> PromptSource:
    """Build the source that `[data]` describes. Raises DataError, which names `table` as the place of its settings."""
    data, seed = config.data, config.run.seed
    if data.source == "jsonl":
        skips_empty = data.on_bad_prompt == "skip"
        return JsonlSource(data.path, data.format, f"{table}.path", data.fields, skips_empty=skips_empty)
    try:
        match data.source:
            case "chains":
                return ChainSource(data.size, seed, data.options)
            case "programs":
                return ProgramSource(data.size, seed, data.options)
            case "reasoning_gym":
                return ReasoningGymSource(data.dataset, data.size, seed, data.options)
    except DataError as error:
        if table == "data":
            raise
        raise DataError(f"{table}: {error}") from error
