"""Prompt sources (chains, programs, reasoning-gym, JSONL) and the resumable stream over them."""

from bapo_megatron.config.schema import Config
from bapo_megatron.prompts.base import PromptSource
from bapo_megatron.prompts.chains import ChainSource
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.programs import ProgramSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource


def build_source(config: Config, path_setting: str = "data.path") -> PromptSource:
    """Build the source that `[data]` describes. Raises DataError, which calls its file `path_setting`."""
    data, seed = config.data, config.run.seed
    match data.source:
        case "chains":
            return ChainSource(data.size, seed, data.options)
        case "programs":
            return ProgramSource(data.size, seed, data.options)
        case "reasoning_gym":
            return ReasoningGymSource(data.dataset, data.size, seed, data.options)
        case "jsonl":
            return JsonlSource(data.path, data.format, path_setting)
