"""`bapo init`: a configuration for a model and a file of prompts, with a layout that fits this machine.

model -> shape, chat template ----+
file -> format, longest prompt ---+-> settings -> layout that fits (preflight/suggest.py) -> `bapo check` -> TOML
machine -> GPUs, memory ----------+
"""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.load import load_tables, merge, parse_override
from bapo_megatron.errors import ConfigError, DataError, UserError
from bapo_megatron.hf.shape import ModelShape, load_hf_config, model_shape
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.preflight.check import num_visible_gpus, violations_of
from bapo_megatron.preflight.known import GIB, GPUS
from bapo_megatron.preflight.memory import fullest_rank, model_parameters
from bapo_megatron.preflight.plan import make_plan, memory_problems
from bapo_megatron.preflight.suggest import suggest
from bapo_megatron.prompts.base import Question
from bapo_megatron.prompts.jsonl import JsonlSource

_FORMATS = ("plain", "gsm8k", "humaneval", "math")  # in this order: rows of gsm8k could be read as math, too
_MAX_MEASURED = 10_000  # prompts; longer ones after them are skipped
_CPU_SHARE = 0.8  # usable share of the memory without GPUs

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of a machine, all of one kind, and its memory."""

    num_gpus: int
    gpu_name: str  # as CUDA reports it, such as "NVIDIA H100 80GB HBM3"
    gpu_memory_gib: float
    memory_gib: float

    @property
    def gpu(self) -> str | None:
        """The kind of GPU, if plans know it."""
        return next((kind for kind in GPUS if kind in self.gpu_name.lower()), None)


def this_machine() -> Machine:
    """Return the visible GPUs and the memory of this machine."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    num_gpus = num_visible_gpus()
    if not num_gpus:
        return Machine(0, "", 0.0, memory_gib)
    import torch

    properties = torch.cuda.get_device_properties(0)
    return Machine(num_gpus, properties.name, properties.total_memory / GIB, memory_gib)


def write_config(model: str, data: Path, output: Path | None, machine: Machine) -> Path:
    """Write a configuration that passes `bapo check` on this machine.

    Args:
        model: a value of model.path.
        data: prompts in a format of `data.format`.
        output: new file; None: <model>.toml in the working directory.

    Raises:
        UserError: model and data cannot be used, the model does not fit, or the file exists.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name.lower()).strip("-._") or "run"
    file = output or Path(f"{name}.toml")
    if file.exists():
        raise UserError(f"{file} exists: give another name with -o, or remove it")
    table = _table(model, data, name if output is None else _run_name(file, name), machine)
    config = load_tables({str(file): table})
    if errors := [v.message for v in violations_of(config, elsewhere=True) if v.severity == "error"]:
        raise ConfigError("\n".join(errors))
    command = shlex.join(["bapo", "init", model, str(data)])
    text = f"# Written by `{command}`. Every other setting has its default: docs/configuration.md.\n\n"
    try:
        file.write_text(text + tomli_w.dumps(table), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; give another name with -o") from error
    return file


def _run_name(file: Path, default: str) -> str:
    return file.stem if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", file.stem) else default


def _table(model: str, data: Path, name: str, machine: Machine) -> Table:
    folder = resolve_model_path(model, weights=False)
    hf_config = load_hf_config(folder)
    shape = model_shape(hf_config, folder)
    format_name, questions = _read(data)
    tokenizer = load_tokenizer(folder)
    longest = _longest(questions[:_MAX_MEASURED], tokenizer)
    prompt_tokens = _rounded_up(longest)
    response_tokens = min(2048 if machine.num_gpus else 256, shape.max_positions - prompt_tokens)
    if response_tokens < 1:
        raise UserError(
            f"{data}: the longest prompt has {longest} tokens, which leaves no room for a response in the "
            f"{shape.max_positions} that {model} can read; shorten it"
        )
    table: Table = {
        "run": {"name": name},
        "model": {"path": model},
        "data": {
            "source": "jsonl",
            "path": str(data),
            "format": format_name,
            "chat_template": bool(tokenizer.chat_template),
            "max_prompt_tokens": prompt_tokens,
        },
        "rollout": {"max_response_tokens": response_tokens, "samples_per_prompt": 8},
        "train": {"num_steps": 100, "minibatches_per_step": 2},
        "optimizer": {"lr": 1e-6},
    }
    if format_name == "humaneval":
        table["reward"] = {"kind": "code"}
    if len(questions) > _MAX_MEASURED:
        table["data"]["on_bad_prompt"] = "skip"
    if machine.num_gpus > 1:
        return _on_gpus(table, hf_config, shape, machine)
    return _on_cpu(table, shape, machine)


def _read(data: Path) -> tuple[str, list[Question]]:
    """Return the format of a file, and its rows. Raises DataError if no format fits: the reason of the plainest."""
    problems = []
    for name in _FORMATS:
        try:
            return name, JsonlSource(str(data), name).questions
        except DataError as error:
            problems.append(error)
    raise problems[0]


def _longest(questions: Sequence[Question], tokenizer: Any) -> int:
    """Return the tokens of the longest prompt, in the chat template if there is one."""
    texts = [question.text for question in questions]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template, verbose=False)
    return max(map(len, encoded["input_ids"]))


def _rounded_up(num_tokens: int) -> int:
    return max(64, 1 << (num_tokens - 1).bit_length())


def _on_cpu(table: Table, shape: ModelShape, machine: Machine) -> Table:
    """Add a trainer of one rank and an embedded engine; a single GPU trains, as a server would need another."""
    merge(table, {"rollout": {"prompts_per_step": 4}, "train": {"max_tokens_per_microbatch": 2048}})
    config = load_tables({"": table})
    trainer = fullest_rank(config, shape).total / GIB
    engine = 4 * model_parameters(shape) / GIB  # its float32 weights
    if machine.num_gpus and trainer <= machine.gpu_memory_gib:
        trainer = 0.0  # not of the machine's memory
    if trainer + engine > _CPU_SHARE * machine.memory_gib:
        raise UserError(
            f"{table['model']['path']} does not fit this machine: the trainer needs {trainer:.1f} GiB and the engine "
            f"{engine:.1f} GiB of {machine.memory_gib:.1f} GiB; take a smaller model, or a machine with GPUs"
        )
    return table


def _on_gpus(table: Table, hf_config: Table, shape: ModelShape, machine: Machine) -> Table:
    """Give half of the GPUs to SGLang servers, as few for each as hold the model; the trainer gets the fastest layout.

    Raises:
        UserError: no layout fits.
    """
    num_served = machine.num_gpus // 2
    merge(
        table,
        {
            "model": {"dtype": "bfloat16"},
            "rollout": {"engine": "sglang", "prompts_per_step": 32},
            "optimizer": {"distributed": machine.num_gpus > 3},
            "parallel": {"data": machine.num_gpus - num_served},
            "cluster": {"gpu": machine.gpu or "a100", "gpus_per_node": machine.num_gpus},
        },
    )
    if machine.gpu is None:  # rates of an A100, its own memory
        table["cluster"]["gpu_memory_gib"] = round(machine.gpu_memory_gib, 1)
    problems = ["there is no layout for this model"]
    for tensor in (n for n in range(1, num_served + 1) if num_served % n == 0 and shape.num_heads % n == 0):
        merge(table, {"rollout": {"num_servers": num_served // tensor, "server_tensor_parallel": tensor}})
        config = load_tables({"": table})
        present = make_plan(config, shape)
        if present.server is None or present.server.concurrency == 0:
            problems = [v.message for v in memory_problems(config, present)]
            continue
        better = suggest(config, hf_config, present, count=1)
        if better:
            for path, value in map(parse_override, better[0].overrides):
                merge(table, {path[0]: {path[1]: value}})
        elif not present.fits:
            problems = [v.message for v in memory_problems(config, present)]
            continue
        if machine.gpu is None:
            del table["cluster"]
        return table
    raise UserError(
        f"{table['model']['path']} does not fit {machine.num_gpus} x {machine.gpu_name}: {'; '.join(problems)}"
    )
