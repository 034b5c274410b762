"""`bapo init`: a configuration for a model and rows of prompts, with a layout that fits this machine.

model -> shape, chat template -------------------+
rows -> format, columns, judge, longest prompt --+-> settings -> layout that fits (preflight/suggest.py) -> TOML
machine -> GPUs, memory -------------------------+

One GPU is shared by the trainer and a server if both fit, in a split or in turns, with LoRA if that makes them fit. Of
several GPUs, each side gets half, or both share all of them in one of these ways, whichever has the shorter step; with
LoRA if nothing else fits. The file passes `bapo check`.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from bapo_megatron.assets import SHIPPED_MODELS, resolve_model_path
from bapo_megatron.config.base import Violation, overlap
from bapo_megatron.config.dotted import is_dotted
from bapo_megatron.config.load import Reading, load_tables, merge, parse_override, parse_overrides, read_tables
from bapo_megatron.config.schema import SourceConfig
from bapo_megatron.config.sources import source_kind
from bapo_megatron.errors import ConfigError, DataError, UserError, collecting
from bapo_megatron.hf.shape import ModelShape, load_hf_config, model_shape
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.machine.gpus import FULL, GIB, GPUS, kind_of
from bapo_megatron.machine.memory import fullest_rank
from bapo_megatron.machine.parameters import model_parameters
from bapo_megatron.preflight.check import num_visible_gpus, violations_of
from bapo_megatron.preflight.explain import PLANNED_S, time_text
from bapo_megatron.preflight.inputs import check_judge
from bapo_megatron.preflight.machine_checks import copied_bytes
from bapo_megatron.preflight.plan import (
    LORA_RANK,
    RunPlan,
    make_plan,
    memory_problems,
    step_balance,
    with_lora,
    with_turns,
)
from bapo_megatron.preflight.suggest import FASTER, best_split, suggest
from bapo_megatron.prompts.base import Question
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.encoding import many_prompt_ids
from bapo_megatron.prompts.jsonl import ANSWER_COLUMNS, PROMPT_COLUMNS, RowSource, has, named_rows, value_at
from bapo_megatron.prompts.rows import Row, may_be_on_hub, read_rows
from bapo_megatron.prompts.stream import question_ids, too_many_chars
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.runtime import memory_bytes

_FORMATS = ("plain", "gsm8k", "humaneval", "math")  # in this order: rows of gsm8k could also be read as math
_ASKED = ("question", "problem")  # columns with bare questions, which do not say how to answer
_WORDS = re.compile(r"[^\W\d_]+(?:[ .,'-]+[^\W\d_]+)*[.]?")
_MAX_MEASURED = 10_000  # prompts to measure; a run skips longer ones after them
_SAME_MEMORY = 0.02  # difference from the table that a driver explains; a board with 40 GB in place of 80 differs more
_FEW_ROWS = 512  # rows of logits in a chunk where memory is short
_LR, _LORA_LR = 1e-6, 1e-5  # adapters start from zero, and take larger steps
_CPU_SHARE = 0.8  # usable share of the memory without GPUs

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs of a machine, all of one kind, and its memory."""

    num_gpus: int
    gpu_name: str  # as CUDA reports it, such as "NVIDIA H100 80GB HBM3"
    gpu_memory_gib: float
    memory_gib: float

    @property
    def gpu(self) -> str | None:
        """The kind of GPU, if plans know it."""
        return kind_of(self.gpu_name)


def this_hardware() -> Hardware:
    """Return the visible GPUs and the memory of this machine."""
    memory_gib = memory_bytes() / GIB
    num_gpus = num_visible_gpus()
    if not num_gpus:
        return Hardware(0, "", 0.0, memory_gib)
    import torch

    properties = torch.cuda.get_device_properties(0)
    return Hardware(num_gpus, properties.name, properties.total_memory / GIB, memory_gib)


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """A written configuration, and its first prompt."""

    file: Path
    table: Table
    prompt: str  # as the model reads it, special tokens included
    answer: Any
    told: list[Violation]  # warnings and notes of its check
    gpus: str  # how trainer and servers use them, and why; empty without GPUs

    def __str__(self) -> str:
        """Describe what was found in the data, how the model sees the first prompt, and what uses the GPUs."""
        data = self.table["data"]
        columns = "".join(f", {field} = {column!r}" for field, column in data.get("fields", {}).items())
        judge = self.table.get("reward", {}).get("kind", "math")
        shown = "\n".join(f"  {line}" for line in self.prompt.split("\n"))
        answer = self.answer if isinstance(self.answer, str) else json.dumps(self.answer, ensure_ascii=False)
        facts = {"data": f"format {data['format']}{columns}", "judge": judge, "answer": f"{answer:.200}"}
        facts |= {"GPUs": self.gpus} if self.gpus else {}
        return f"first prompt:\n{shown}\n" + "\n".join(f"{name:<8} {fact}" for name, fact in facts.items())


def write_config(
    model: str, data: Path, output: Path | None, hardware: Hardware, settings: Sequence[str] = ()
) -> WrittenConfig:
    """Write a configuration that passes `bapo check` on this machine.

    Args:
        model: a value of model.path.
        data: a file, the name of a data set on the hub, or the dotted path of a function, with prompts in a format of
            `data.format` or in columns with usual names.
        output: new file; None means <model>.toml in the working directory.
        settings: the user's own settings, such as "data.fields.prompt=question".

    Raises:
        UserError: settings, model, data or judge cannot be used, the model does not fit, or the file cannot be
            written; names all of this together.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name.lower()).strip("-._") or "run"
    file = output or Path(f"{name}.toml")
    reading = read_tables({}, settings)
    given = _valid(settings, reading)
    problems = [v.message for v in reading.violations]
    if file.exists():
        problems.append(f"{file} exists: give another name with -o, or remove it")
    elif not file.absolute().parent.is_dir():
        problems.append(f"cannot write {file}: there is no folder {file.parent}; give another name with -o")
    with collecting(problems):
        inputs = _read_inputs(model, data, given, is_data_known=not overlap(reading.unread, ["data"]))
    if not problems:
        assert inputs is not None, "the settings of [data] are right"
        with collecting(problems):
            table, gpus = _table(inputs, name if output is None else _run_name(file, name), hardware, given)
    if problems:  # otherwise the check calls the judge with a prompt
        if not overlap(reading.unread, ["reward"]):
            with collecting(problems):
                alone = load_tables({"": {"reward": given.get("reward", {})}})
                problems += [v.message for v in check_judge(alone, [], is_complete=True) if v.severity == "error"]
        raise UserError("\n".join(problems))
    assert inputs is not None
    if file.parent.resolve() != Path.cwd():  # relative paths start from the working folder
        _make_absolute(table)
    config = load_tables({str(file): table})
    found = violations_of(config, elsewhere=True)
    if errors := [v.message for v in found if v.severity == "error"]:
        raise ConfigError("\n".join(errors))
    command = shlex.join(["bapo", "init", model, str(data), *settings])
    text = f"# Written by `{command}`. Every other setting has its default: `bapo help settings`.\n"
    text += f"# GPUs: {gpus}.\n" if gpus else ""
    if table.get("bapo") != given.get("bapo"):
        text += '# The clip bounds are fixed (docs/losses.md). With bapo.preset="default" they adapt: BAPO.\n'
    try:
        file.write_text(f"{text}\n{tomli_w.dumps(table)}", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; give another name with -o") from error
    return WrittenConfig(file, table, inputs.first, inputs.questions[0].answer, found, gpus)


def _valid(settings: Sequence[str], reading: Reading) -> Table:
    """Return the user's settings as a table, without those that are wrong."""
    given: Table = {}
    for _, path, value in parse_overrides(settings)[0]:
        if not overlap([".".join(path)], reading.unread):
            for key in reversed(path):
                value = {key: value}
            merge(given, value)
    return given


def _make_absolute(table: Table) -> None:
    """Make the paths of model and data valid in any working folder."""
    model, data = Path(table["model"]["path"]).expanduser(), table["data"]
    if model.is_dir() and table["model"]["path"] not in SHIPPED_MODELS:
        table["model"]["path"] = str(model.absolute())
    if source_kind(data["source"]).path == "file":
        data["path"] = str(Path(data["path"]).expanduser().absolute())


def _run_name(file: Path, default: str) -> str:
    return file.stem if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", file.stem) else default


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A model and rows of prompts, as they were read."""

    model: str
    hf_config: Table
    shape: ModelShape
    data: Path
    read_as: Table  # settings
    questions: Sequence[Question]
    has_template: bool
    first: str  # prompt as the model sees it
    num_tokens: int  # longest prompt


def _read_inputs(model: str, data: Path, given: Table, *, is_data_known: bool) -> _Inputs | None:
    """Read model and data. Raises UserError with the problems of both.

    Args:
        is_data_known: whether all settings of [data] are right; if not, only the model is read, and the result is None.
    """
    problems: list[str] = []
    with collecting(problems):
        folder = resolve_model_path(model, weights=False)
        hf_config = load_hf_config(folder)
        shape = model_shape(hf_config, folder)
    if is_data_known:
        with collecting(problems):
            read_as, source = _read(data, given.get("data", {}))
    if problems:
        raise UserError("\n".join(problems))
    if not is_data_known:
        return None
    questions = source.questions
    tokenizer = load_tokenizer(folder)
    for one in questions[:_MAX_MEASURED]:
        if num_chars := too_many_chars(one, shape.max_positions):
            raise UserError(
                f"{one.where}: the prompt has {num_chars:,} characters, too many for the {shape.max_positions} tokens "
                f"that {model} can read; shorten it"
            )
    prompts = _put(questions[:_MAX_MEASURED], tokenizer, given.get("data", {}), data)
    return _Inputs(
        model,
        hf_config,
        shape,
        data,
        read_as,
        questions,
        has_template=bool(tokenizer.chat_template),
        first=tokenizer.decode(prompts[0]),
        num_tokens=max(map(len, prompts)),
    )


def _table(inputs: _Inputs, name: str, hardware: Hardware, given: Table) -> tuple[Table, str]:
    """Return the settings, and what uses the GPUs.

    Raises UserError if no response fits behind a prompt, or the model does not fit.
    """
    shape, longest, questions = inputs.shape, inputs.num_tokens, inputs.questions
    wanted_tokens = 2048 if hardware.num_gpus else 256
    prompt_tokens = min(_rounded_up(longest), max(longest, shape.max_positions - wanted_tokens))
    response_tokens = min(wanted_tokens, shape.max_positions - prompt_tokens)
    if response_tokens < 1:
        raise UserError(
            f"{inputs.data}: the longest prompt has {longest} tokens, which leaves no room for a response in the "
            f"{shape.max_positions} that {inputs.model} can read; shorten it"
        )
    table: Table = {
        "run": {"name": name},
        "model": {"path": inputs.model},
        "data": {
            **inputs.read_as,
            "chat_template": inputs.has_template,
            "max_prompt_tokens": prompt_tokens,
        },
        "rollout": {"max_response_tokens": response_tokens, "samples_per_prompt": 8},
        "train": {"num_steps": 100, "minibatches_per_step": 2},
        "optimizer": {"lr": _LORA_LR if "rank" in given.get("lora", {}) else _LR},
    }
    if "bapo" not in given and "name" not in given.get("loss", {}):
        table["bapo"] = {"preset": "wide"}  # adapting bounds gain nothing (studies/results/one_setting.md)
    if (judge := _judge_for([question.answer for question in questions])) != "math":
        table["reward"] = {"kind": judge}
    turns = load_tables({"": {"environment": given.get("environment", {})}}).environment
    if turns.max_given_tokens and response_tokens + turns.max_given_tokens > (
        room := shape.max_positions - prompt_tokens
    ):
        table["rollout"]["max_response_tokens"] = min(response_tokens, room // 2)  # the answers get what is left
        answer_tokens = (room - room // 2) // (turns.max_turns - 1)
        table["environment"] = {"max_answer_tokens": min(turns.max_answer_tokens, max(1, answer_tokens))}
    if len(questions) > _MAX_MEASURED:
        table["data"]["on_bad_prompt"] = "skip"
    merge(table, given)
    if hardware.num_gpus > 1:
        table, gpus = _on_gpus(table, inputs.hf_config, shape, hardware, given)
    elif hardware.num_gpus:
        table, gpus = _on_one_gpu(table, inputs.hf_config, hardware, given, len(questions))
    else:
        table, gpus = _on_cpu(table, inputs.hf_config, hardware, len(questions)), ""
    return merge(table, given), gpus


def _read(data: Path, given: Table) -> tuple[Table, RowSource]:
    """Return source, format, columns and rows. Raises DataError, with the plainest's reason, if no format fits."""
    source, what, rows = _rows(data, given)
    problems = []
    fields = given.get("fields", {})
    candidates: list[Table] = [{"format": name} for name in _FORMATS] + _named_columns(rows[:1], fields)
    for read_as in candidates if "format" not in given else [{"format": given["format"]}]:
        settings = {**read_as, "fields": {**read_as.get("fields", {}), **fields}}
        try:
            found = RowSource(source["source"], rows, what=what, format=settings["format"], fields=settings["fields"])
        except DataError as error:
            problems.append(error)
            continue
        return {**source, **(settings if settings["fields"] else read_as)}, found
    if rows and not {"prompt", "answer"} & fields.keys() and not any(has(rows[0].values, n) for n in ANSWER_COLUMNS):
        prompt = next((name for name in (*PROMPT_COLUMNS, *_ASKED) if has(rows[0].values, name)), None)
        if prompt not in ("prompt", "messages"):  # otherwise one column is missing, and the problem says that
            lacks = "no answers" if prompt else "neither prompts nor answers"
            how = f"data.fields.prompt={prompt or 'COLUMN'} data.fields.answer=COLUMN"
            columns = ", ".join(map(repr, rows[0].values))
            raise DataError(f"{what} has {lacks} under a usual name; give {how}, out of {columns}")
    raise problems[0]


def _rows(data: Path, given: Table) -> tuple[Table, str, list[Row]]:
    """Return the settings that name the rows, the rows' name in messages, and the rows. Raises UserError."""
    name = str(data)
    kind = given.get("source", _kind_of(data))
    path = source_kind(kind).path
    if path == "file":
        return {"source": kind, "path": name}, f"{data}: the file", list(read_rows(data.expanduser(), "DATA"))
    source = {"source": kind, "path": name} if path else {"source": kind}
    one = SourceConfig(**{key: value for key, value in (given | source).items() if key in SourceConfig.model_fields})
    if not one.has_rows:
        raise UserError(f'data.source="{kind}" makes prompts, and DATA names others; leave data.source out')
    try:
        what, rows = named_rows(one, "data")
        return source, what, list(rows)
    except DataError as error:
        if "source" in given:
            raise
        raise DataError(f"DATA: there is no file {data.absolute()}, and as a data set of the hub: {error}") from error


def _kind_of(data: Path) -> str:
    """Return the value of data.source for what DATA names; an existing path is a file."""
    if data.expanduser().exists():
        return "jsonl"
    if is_dotted(str(data)):
        return str(data)
    return "hub" if may_be_on_hub(data) else "jsonl"


def _named_columns(rows: Sequence[Row], fields: Table) -> list[Table]:
    """Return the possible readings of the first row's columns, if they have usual names."""
    if not rows:
        return []
    (row,) = rows
    prompt = fields.get("prompt") or next((name for name in PROMPT_COLUMNS if has(row.values, name)), None)
    answer = fields.get("answer") or next(
        (n for n in ANSWER_COLUMNS if has(row.values, n) and not isinstance(value_at(row.values, n), bool | None)), None
    )
    if prompt is None or answer is None or prompt == answer:
        return []
    name = "math" if prompt in _ASKED else "plain"
    columns = {"prompt": prompt, "answer": answer}
    return [{"format": name, "fields": {field: column for field, column in columns.items() if field != column}}]


def _judge_for(answers: Sequence[Any]) -> str:
    """Return the kind of judge that fits most of the answers."""
    if isinstance(answers[0], dict) and answers[0].keys() & {"tests", "cases"}:
        return "code"
    num_words = sum(isinstance(a, bool) or (isinstance(a, str) and bool(_WORDS.fullmatch(a.strip()))) for a in answers)
    return "text" if 2 * num_words > len(answers) else "math"


def _put(questions: Sequence[Question], tokenizer: Any, given: Table, data: Path) -> list[list[int]]:
    """Return the prompts' tokens, in the chat template if there is one."""
    if not tokenizer.chat_template:
        if chat := next((question for question in questions if question.messages), None):
            raise UserError(
                f"{chat.where}: the prompt is a conversation, and this model has no chat template for it; use a "
                "model that was trained to chat"
            )
        return many_prompt_ids(tokenizer, [question.text for question in questions])
    template, system_prompt = Continuation(tokenizer, given.get("template_options", {})), given.get("system_prompt")
    return [question_ids(one, tokenizer, template, system_prompt, one.tools) for one in questions]


def _rounded_up(num_tokens: int) -> int:
    return max(64, 1 << (num_tokens - 1).bit_length())


def _on_cpu(table: Table, hf_config: Table, hardware: Hardware, num_prompts: int) -> Table:
    """Add a trainer of one rank, which uses a GPU if there is one, and an embedded engine."""
    merge(table, {"rollout": {"prompts_per_step": min(4, num_prompts)}})
    pack_tokens = max(2048, load_tables({"": table}).longest_trained)
    merge(table, {"train": {"max_tokens_per_microbatch": pack_tokens}})
    run = resolve(load_tables({"": table}), hf_config)
    trainer = fullest_rank(run, int(hardware.gpu_memory_gib * GIB) or None).total / GIB
    engine = 4 * model_parameters(run.shape) / GIB  # its float32 weights
    if hardware.num_gpus:
        if trainer > (have := FULL * hardware.gpu_memory_gib):
            raise UserError(
                f"{table['model']['path']} does not fit 1 x {hardware.gpu_name}: the trainer alone needs {trainer:.1f} "
                f"GiB, and {FULL:.0%} of the GPU is {have:.1f} GiB; use a smaller model, or more GPUs"
            )
        trainer = 0.0  # it uses GPU memory
    if trainer + engine > _CPU_SHARE * hardware.memory_gib:
        raise UserError(
            f"{table['model']['path']} does not fit this machine: the trainer needs {trainer:.1f} GiB and the engine "
            f"{engine:.1f} GiB of {hardware.memory_gib:.1f} GiB; use a smaller model, or a machine with GPUs"
        )
    return table


@dataclass(frozen=True, slots=True)
class _Layout:
    """Settings that fit or not, and their plan."""

    table: Table
    run: Resolved
    plan: RunPlan

    @property
    def step_s(self) -> float:
        """The expected time of a step."""
        of_step = step_balance(self.run.config, self.plan)
        assert of_step is not None, "there are SGLang servers"
        return of_step.step_s


def _fastest(found: Iterable[_Layout]) -> _Layout | None:
    """Return the first layout, or a later one if its step is a tenth shorter; None if there is none."""
    chosen = None
    for one in found:
        if chosen is None or (chosen.step_s >= PLANNED_S and one.step_s < FASTER * chosen.step_s):
            chosen = one
    return chosen


def _on_one_gpu(
    table: Table, hf_config: Table, hardware: Hardware, given: Table, num_prompts: int
) -> tuple[Table, str]:
    """Let trainer and server share the GPU in a split or, if that alone fits or is a tenth faster, in turns; with LoRA
    if that makes them fit; otherwise the trainer has it, and the engine uses CPUs.

    Returns:
        Settings, and how the GPU is used.

    Raises:
        UserError: neither fits.
    """
    servers = _with_servers(table, hardware)
    found = list(_shared_by_both(servers, hf_config, hardware, given))
    run = found[0].run
    if not (run.placement.shares_gpus and run.engine.on_gpus):  # the user wants something else
        return _on_cpu(table, hf_config, hardware, num_prompts), "the trainer has it"
    chosen, how, why = _fastest(one for one in found if one.plan.fits), "", ""
    if chosen is None and (lora := _with_lora(servers, run, given)) is not None:
        adapted = _shared_by_both(lora, hf_config, hardware, given)
        chosen, how = _fastest(one for one in adapted if one.plan.fits), " with LoRA"
        of_all = min(one.plan.trainer_needs for one in found) / GIB
        why = f"; to train all weights, they would need {of_all:.1f} at least"
    if chosen is not None:
        shared, have = chosen.plan.shared, FULL * chosen.plan.gpu_memory_gib
        assert shared is not None
        use, needs = "share", f"{shared.trainer.total / GIB:.1f} and {shared.server_bytes / GIB:.1f}"
        if shared.takes_turns:
            use, needs = "take turns on", f"at most {max(map(sum, shared.phases.values())) / GIB:.1f}"
        use = f"trainer and server {use} it{how}, and need {needs} of {have:.1f} GiB{why}"
        return _without_guess(chosen.table, hardware), use
    *_, problem = (violation for one in found for violation in memory_problems(one.run, one.plan))
    if "placement" in given.get("rollout", {}):
        raise UserError(problem.message)
    try:
        table = _on_cpu(table, hf_config, hardware, num_prompts)
    except UserError as error:
        raise UserError(f"{error}; {problem.problem}") from error
    return table, f"the trainer has it, and the engine samples on CPUs, which is slow; {problem.problem}"


def _shared_by_both(table: Table, hf_config: Table, hardware: Hardware, given: Table) -> Iterator[_Layout]:
    """Yield a split of the GPU and, if the user leaves it open and the machine's memory allows it, turns on it."""
    split = merge(merge(deepcopy(table), {"rollout": {"placement": "split"}}), given)
    yield _with_most_responses(split, hf_config, given)
    turns = with_turns(resolve(load_tables({"": split}), hf_config))
    if "placement" not in given.get("rollout", {}) and turns is not None and _fits_memory(turns, hardware):
        yield _with_most_responses(merge(split, {"rollout": {"placement": "turns"}}), hf_config, given)


def _fits_memory(run: Resolved, hardware: Hardware) -> bool:
    """Return whether the machine's memory holds what a run copies there."""
    return sum(copied_bytes(run)) <= hardware.memory_gib * GIB


def _with_most_responses(table: Table, hf_config: Table, given: Table) -> _Layout:
    """Compute logits in smaller chunks if the server then holds more responses."""
    found: list[_Layout] = []
    for train in ({}, {"logprob_chunk_tokens": _FEW_ROWS}):
        changed = merge(merge(deepcopy(table), {"train": train}), given)
        run = resolve(load_tables({"": changed}), hf_config)
        found.append(_Layout(changed, run, make_plan(run)))
    return max(found, key=lambda one: one.plan.server.concurrency if one.plan.server else 0)


def _with_lora(table: Table, run: Resolved, given: Table) -> Table | None:
    """Return the settings with adapters in place of all weights; None if the model can have none, or has some."""
    if with_lora(run) is None:
        return None
    return merge(merge(deepcopy(table), {"lora": {"rank": LORA_RANK}, "optimizer": {"lr": _LORA_LR}}), given)


def _with_servers(table: Table, hardware: Hardware) -> Table:
    """Return the settings with SGLang servers, and a cluster to plan for."""
    kind = hardware.gpu or "a100"  # assume an A100's rates, with this GPU's memory, if it is unknown
    cluster: Table = {"gpu": kind, "gpus_per_node": hardware.num_gpus}
    if abs(hardware.gpu_memory_gib / GPUS[kind].memory_gib - 1) > _SAME_MEMORY:
        cluster["gpu_memory_gib"] = round(hardware.gpu_memory_gib, 1)
    rollout = {"engine": "sglang", "prompts_per_step": 32}
    return merge(deepcopy(table), {"model": {"dtype": "bfloat16"}, "rollout": rollout, "cluster": cluster})


def _without_guess(table: Table, hardware: Hardware) -> Table:
    """Remove the cluster if it only stands for an unknown kind of GPU."""
    return table if hardware.gpu else {name: section for name, section in table.items() if name != "cluster"}


def _on_gpus(table: Table, hf_config: Table, shape: ModelShape, hardware: Hardware, given: Table) -> tuple[Table, str]:
    """Give trainer and servers half of the GPUs each, or let them share all, in a split or in turns, if a step is then
    a tenth shorter; with LoRA if nothing else fits.

    Returns:
        Settings, and how the GPUs are used.

    Raises:
        UserError: neither fits.
    """
    table, wanted = _with_servers(table, hardware), given.get("rollout", {}).get("placement")
    run = resolve(load_tables({"": table}), hf_config)
    lora, problems, found = _with_lora(table, run, given), list[str](), dict[str, _Layout]()
    placements = ("separate", "split", *(["turns"] if with_turns(run) is not None else []))
    for tried in (table,) if lora is None else (table, lora):
        for placement in placements if wanted is None else (wanted,):
            with collecting(problems):
                if placement == "separate":
                    found[placement] = _halves(tried, hf_config, shape, hardware)
                else:
                    found[placement] = _shared(tried, hf_config, hardware, placement)
        if found:
            break
    if (chosen := _fastest(found.values())) is None:
        raise UserError(
            f"{table['model']['path']} does not fit {hardware.num_gpus} x {hardware.gpu_name}: "
            f"{'; '.join(dict.fromkeys(problems))}"
        )
    num_served = hardware.num_gpus // 2
    split_up = f"{hardware.num_gpus - num_served} + {num_served}"
    uses = {
        "separate": (f"{split_up} for trainer and servers", f"{split_up} GPUs"),
        "split": ("trainer and servers share all of them", "shared ones"),
        "turns": ("trainer and servers take turns on all of them", "turns"),
    }
    placement = next(name for name, layout in found.items() if layout is chosen)
    use = uses[placement][0]
    use += ", with LoRA, because training all weights does not fit" if tried is lora else ""
    if chosen.step_s >= PLANNED_S:
        others = (
            f"{uses[name][1]} " + (f"take {time_text(found[name].step_s)}" if name in found else "do not fit")
            for name in placements
            if name != placement
        )
        use += f", with an expected step of {time_text(chosen.step_s)}"
        use += f"; {', '.join(others)}" if wanted is None else ""
    return _without_guess(chosen.table, hardware), use


def _shared(table: Table, hf_config: Table, hardware: Hardware, placement: str) -> _Layout:
    """Find the fastest layout of a trainer and servers that share all GPUs. Raises UserError if none fits."""
    shared = {"parallel": {"data": hardware.num_gpus}, "rollout": {"placement": placement}}
    table = merge(deepcopy(table), shared)
    best = best_split(resolve(load_tables({"": table}), hf_config))
    if best is None or not _fits_memory(best.run, hardware):
        raise UserError(f'no layout fits with rollout.placement="{placement}"')
    return _Layout(merge(table, best.change), best.run, best.plan)


def _halves(table: Table, hf_config: Table, shape: ModelShape, hardware: Hardware) -> _Layout:
    """Give half of the GPUs to SGLang servers, each with as few as hold the model; the trainer gets the fastest layout.

    Raises:
        UserError: no layout fits.
    """
    num_served = hardware.num_gpus // 2
    table = merge(
        deepcopy(table),
        {
            "optimizer": {"distributed": hardware.num_gpus > 3},
            "parallel": {"data": hardware.num_gpus - num_served},
        },
    )
    if hardware.gpu is None:
        merge(table, {"train": {"recompute": False}})  # without [cluster] the run has no plan that decides
    problems = ["there is no layout for this model"]
    for tensor in (n for n in range(1, num_served + 1) if num_served % n == 0 and shape.num_heads % n == 0):
        merge(table, {"rollout": {"num_servers": num_served // tensor, "server_tensor_parallel": tensor}})
        run = resolve(load_tables({"": table}), hf_config)
        plan = make_plan(run)
        if plan.server is None or plan.server.concurrency == 0:
            problems = [v.message for v in memory_problems(run, plan)]
            continue
        better = suggest(run, plan, count=1)
        if better:
            plan = better[0].plan
            for path, value in map(parse_override, better[0].overrides):
                merge(table, {path[0]: {path[1]: value}})
        elif not plan.fits:
            problems = [v.message for v in memory_problems(run, plan)]
            continue
        return _Layout(table, run, plan)
    raise UserError("; ".join(problems))
