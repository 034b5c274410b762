"""Sources of prompts."""

from collections.abc import Iterator

from bapo_megatron.config.base import Violation
from bapo_megatron.config.schema import Config, SourceConfig


def check_data(config: Config) -> Iterator[Violation]:
    """Check the sources of training prompts."""
    data = config.data
    if data.sources and data.path is not None:
        yield Violation(
            ("data.path", "data.sources"),
            f"data.path={data.path} names a file besides data.sources",
            "make it one of them, or leave it out",
        )
    for name in data.only_in_template if not data.chat_template else ():
        yield Violation(
            ("data.chat_template", name),
            f"{name} is used only by the chat template",
            f"set data.chat_template=true, or leave {name} out",
        )
    for table, one in config.prompt_sources.items():
        yield from check_source(table, one)


_PATHS = {"file": "a file with one JSON object per line", "data set": 'the name of a data set, such as "openai/gsm8k"'}


def check_source(table: str, one: SourceConfig) -> Iterator[Violation]:
    """Check one source of prompts, described by `table`: it must name what it draws from, and nothing else."""
    decided_by = (f"{table}.source", *(["data.sources"] if table == "data" else []))  # [data] is read without sources
    if one.kind.path is not None and one.path is None:
        problem = f'{table}.source="{one.source}" needs {table}.path'
        yield Violation((f"{table}.path", *decided_by), problem, f"set it to {_PATHS[one.kind.path]}")
    if "dataset" in one.kind.reads and one.dataset is None:
        yield Violation(
            (f"{table}.dataset", *decided_by),
            f'{table}.source="{one.source}" needs {table}.dataset',
            f'set it, such as {table}.dataset="basic_arithmetic"',
        )
    if table != "data" and not one.needs_path and one.path is not None:
        problem = f'{table}.path={one.path} has no effect with source="{one.source}"'
        yield Violation((f"{table}.path", *decided_by), problem, "leave one of them out")
