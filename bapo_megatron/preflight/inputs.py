"""Reads what a run will read before it starts: prompts, judge or environment, recordings, names that are passed on.

Each check calls the code that the run calls, but only on the first rows.
"""

import ast
import contextlib
import functools
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bapo_megatron.assets import SHIPPED_MODELS
from bapo_megatron.config.base import Severity, Violation, warning
from bapo_megatron.config.dotted import REWARD
from bapo_megatron.config.schema import Config, EnvironmentConfig, MixedSource, SourceConfig
from bapo_megatron.engines.key import read_key
from bapo_megatron.errors import CheckpointError, UserError, closest, did_you_mean, in_one_line, plural
from bapo_megatron.learner.fit import OTHER_ADAPTERS, check_adapters, check_init_from
from bapo_megatron.prompts import build_source
from bapo_megatron.prompts.base import PromptSource, Question
from bapo_megatron.prompts.jsonl import RowSource
from bapo_megatron.prompts.rows import missing
from bapo_megatron.prompts.tools import ToolOptions, schemas_of
from bapo_megatron.resolved import Resolved
from bapo_megatron.rewards.stated import misfit
from bapo_megatron.rewards.verdicts import EXACT, JudgeSpec, Verdict, fields_of

NUM_ROWS = 256
"""How many prompts of each source have their answers read."""
_MAX_QUOTED_BYTES = 200  # of what a function printed before its process ended
_MAX_TOKENISED = 2000  # of many more rows, some are tokenised: a minute of waiting is too long

Findings = dict[str, list[Violation]]
"""Findings by what was read, so that the tasks of a sweep read everything only once."""

Asked = tuple[Config, str, Question]
"""A source's first question, with the configuration whose judge scores it and the name of the source."""


def read_inputs(run: Resolved, model: Path | None, memory: Findings, *, here: bool) -> list[Violation]:
    """Find what is wrong with what the run will read.

    Args:
        model: folder with the policy's tokenizer; None if it is not on this machine, so that nothing is tokenised.
        memory: findings of earlier calls.
        here: whether files must be on this machine; if not, a missing one is only a warning.
    """
    config = run.config
    found: list[Violation] = []
    if run.engine.samples:
        sections = (config.data, config.reward, config.environment, config.eval)
        values = [section.model_dump_json() for section in sections]
        rollout = (
            config.rollout.prompts_per_step,
            config.rollout.ignore_stop_tokens,
            config.rollout.max_response_tokens,
        )
        key = json.dumps([config.run.seed, config.model.path, *rollout, *values, here])
        if key not in memory:
            memory[key] = list(dict.fromkeys(_prompts_and_judge(run, model, here)))
        found += memory[key]
    else:
        found += _recording(run, model, here)
    return [*found, *_key(run, here), *_initial_adapters(run, here), *_passed_on(run)]


def _key(run: Resolved, here: bool) -> Iterator[Violation]:
    """Read the key of attached servers."""
    path = run.config.rollout.api_key
    if path is None or run.engine.needs != "urls":
        return
    if not here and not Path(path).expanduser().exists():
        problem = f"rollout.api_key={path} is not on this machine, and was not read"
        yield warning(("rollout.api_key",), problem, "the run needs it")
        return
    try:
        read_key(path)
    except UserError as error:
        yield Violation(("rollout.api_key",), str(error))


def _initial_adapters(run: Resolved, here: bool) -> Iterator[Violation]:
    """Read the adapters that the run begins with."""
    config, model, folder = run.config, run.model, run.config.lora.init_from
    if config.lora.rank is None or folder is None or model is None or model.problems:
        return
    path = Path(folder).expanduser()
    if not here and not path.exists():
        problem = f"lora.init_from={folder} is not on this machine, and was not read"
        yield warning(("lora.init_from",), problem, "the run needs it")
        return
    found = [*check_init_from(config.lora)]
    yield from found
    if found or any(check_adapters(config, model)):
        return
    from bapo_megatron.hf.peft import PeftReader, adapter_tensors  # it needs torch

    try:
        with PeftReader(path) as read:
            read.check(run.shape)
            for name in adapter_tensors(run.shape):
                read(name)
    except CheckpointError as error:
        yield Violation(("lora.init_from",), str(error), OTHER_ADAPTERS)


def _prompts_and_judge(run: Resolved, model: Path | None, here: bool) -> Iterator[Violation]:
    """Read the prompts for training and evaluation; let their judge score one of each with the correct answer, or start
    the environment."""
    config = run.config
    if problems := [*_tools(config)]:
        yield from problems
        config = config.model_copy(update={"environment": EnvironmentConfig()})  # the rest is read without
    questions: list[Asked] = []
    is_complete = True
    for table, one in _sources_read(config).items():
        alone, settings = config.with_prompts_of(one), _settings_of(config, table)
        if (one.needs_path and one.path is None) or ("dataset" in one.kind.reads and one.dataset is None):
            is_complete = False  # checks/data.py reports it
            continue
        if one.kind.path == "file" and not (path := Path(one.path or "").expanduser()).exists():
            is_complete = False
            named = tuple(name for name in settings if not name.endswith((".format", ".fields")))
            if here:
                yield Violation(named, missing(path, f"{table}.path"))
            elif model is not None:  # if it lacks the model too, this machine is not the cluster's
                problem = f"{table}.path={one.path} is not on this machine, and was not read"
                yield warning(named, problem, "the run needs it")
            continue
        try:
            source = build_source(alone, table)
            first = [source[i] for i in range(min(NUM_ROWS, len(source)))]
        except UserError as error:
            is_complete = False
            severity: Severity = "warning" if one.kind.path == "data set" and not here else "error"
            yield Violation(settings, str(error), severity=severity)
            continue
        is_trained, is_code = table in config.prompt_sources, config.reward.kind == "code"
        name = one.name if isinstance(one, MixedSource) else source.name
        if one.has_rows and config.has_judge and (misfit_row := _misfit_answer(alone, source)):
            is_complete = False
            yield Violation((*settings, "reward.kind"), misfit_row)
        elif not (is_trained and is_code and not one.has_rows):  # checks/reward.py reports it
            questions.append((config if is_trained and not is_code else alone, name, source[0]))
        if isinstance(source, RowSource):
            yield from _not_used(config, one, source, settings)
        if table == "data" and one.has_rows:
            yield from _few_prompts(config, len(source), settings)
        yield from _lengths(run.changed(alone), model, source, first, settings)
    if config.environment.is_used:
        yield from _environment(run.changed(config), model)
    if model is not None:
        yield from _stop_tokens(run.changed(config), model)
    if config.has_judge:
        yield from check_judge(config, questions, is_complete=is_complete)


def _misfit_answer(config: Config, source: PromptSource) -> str | None:
    """Return why the judge of mathematics or words has no rule for the answer of a row, and which row it is."""
    with contextlib.suppress(UserError):  # `_judge` reports it
        if JudgeSpec.of(config).kind in ("math", "text"):
            questions = (source[i] for i in range(len(source)))
            return next((f"{q.where}: {problem}" for q in questions if (problem := misfit(q.answer))), None)
    return None


def _tools(config: Config) -> Iterator[Violation]:
    """Read the functions that the policy may call."""
    try:
        if (options := ToolOptions.if_used(config.environment)) is not None:
            schemas_of(options.tools)
    except UserError as error:
        yield Violation(("environment.options", "environment.kind"), str(error))


def _few_prompts(config: Config, num_prompts: int, settings: tuple[str, ...]) -> Iterator[Violation]:
    """Warn if there are fewer rows than prompts in a step."""
    if num_prompts < config.rollout.prompts_per_step:
        yield warning(
            ("rollout.prompts_per_step", *settings),
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} is more than the "
            f"{plural(num_prompts, 'prompt')} of {config.data.origin}: a step takes some of them twice or more",
            f"set rollout.prompts_per_step={num_prompts}, or add prompts",
        )


def _not_used(config: Config, one: SourceConfig, source: RowSource, settings: tuple[str, ...]) -> Iterator[Violation]:
    """Name what rows have beyond prompt and answer; warn if it may be a part of the question."""
    if told := source.not_used:
        remedy = "if they belong to the question, write all of it into one column" if source.worth_a_look else ""
        yield Violation(settings, f"{one.origin}: {told}", remedy, "warning" if remedy else "note")
    num_chats = sum(len(question.messages) > 1 or bool(question.tools) for question in source.questions)
    if config.environment.kind == "agent" and num_chats:
        yield warning(
            ("environment.kind", *settings),
            f"{one.origin}: {plural(num_chats, 'prompt')} of {len(source)} have earlier messages or tools, and an "
            "agent program gets only the text of the last message",
            "write all that it needs into that message",
        )


def _settings_of(config: Config, table: str) -> tuple[str, ...]:
    """Return the settings that describe the prompts of a table."""
    one = (config.prompt_sources | config.eval_sets)[table]
    fields = one.kind.reads
    if table == "eval":  # [data] decides the kind of prompts
        return (*(f"{'eval' if field == 'path' else 'data'}.{field}" for field in fields), "eval.sets")
    return (*(f"{table}.{field}" for field in fields), *(["data.sources"] if table == "data" else []))


def _sources_read(config: Config) -> dict[str, SourceConfig]:
    """Return the distinct sources of prompts by table: evaluation may draw from training's source."""
    if config.eval.interval_steps is None or not (config.eval.sets or config.data.kind.path == "file"):
        return config.prompt_sources
    return {**config.prompt_sources, **config.eval_sets}


_NO_TEMPLATE: dict[str, Any] = {"system_prompt": None, "template_options": {}}


def _lengths(
    run: Resolved, model: Path | None, source: PromptSource, first: list[Question], settings: tuple[str, ...]
) -> Iterator[Violation]:
    """Check that the prompts have the right lengths and forms, that the tokenizer can encode them, and that a response
    has room for the answer.

    Args:
        run: its configuration has the prompts of this source.
        settings: the settings that describe the source.
    """
    config, data, limit = run.config, run.config.data, run.config.rollout.max_response_tokens
    questions = source.questions if isinstance(source, RowSource) else first
    read = _telling(questions) if isinstance(source, RowSource) else [*range(len(first))]
    is_judged = config.has_judge and config.reward.is_given
    answers = [str(q.answer) for q in first if isinstance(q.answer, str | int | float) and is_judged]
    # No token of a shipped model is shorter than a byte; loading a tokenizer takes seconds.
    is_short = all(0 < len(question.text.encode()) <= data.max_prompt_tokens for question in questions)
    is_short = is_short and any(len(answer.encode()) <= limit for answer in answers or [""])
    is_plain = not (data.chat_template or any(question.messages or question.tools for question in questions))
    if model is None or (config.model.path in SHIPPED_MODELS and is_short and is_plain):
        return
    from bapo_megatron.prompts.encoding import words_ids
    from bapo_megatron.prompts.stream import PromptStream

    tokenizer = _tokenizer(run, model)
    if isinstance(tokenizer, Violation):
        yield tokenizer
        return
    if not data.chat_template:  # without one, checks/data.py reports these
        config = config.model_copy(update={"data": data.model_copy(update=_NO_TEMPLATE)})
    try:
        stream = PromptStream(config, tokenizer, source)
    except UserError as error:
        template = ("data.chat_template", "data.template_options", "environment.options", "model.path")
        yield Violation(template, str(error))
        return
    how = ("data.max_prompt_tokens", "data.on_bad_prompt", "data.chat_template", "data.system_prompt", "model.path")
    try:
        bad = stream.check(read)
    except UserError as error:
        yield Violation((*settings, *how), str(error))
        return
    if answers and limit < (shortest := min(len(words_ids(tokenizer, answer)) for answer in answers)):
        yield warning(
            ("rollout.max_response_tokens", *settings, "model.path"),
            f"{data.origin}: the shortest answer has {plural(shortest, 'token')}, and rollout.max_response_tokens="
            f"{limit} cuts every response before it",
            f"set rollout.max_response_tokens to more than {shortest}",
        )
    if bad:
        what = f"{len(bad)} of {plural(len(read), 'prompt')} read are left out, as data.on_bad_prompt asks"
        yield warning((*settings, *how), f"{data.origin}: {what}; the first: {bad[0]}", "correct them")
    if stream.left_out:
        fields = ", ".join(
            f"{name} (in {num} of the {plural(len(read), 'prompt')} read)" for name, num in stream.left_out.items()
        )
        yield warning(
            (*settings, "model.path", "data.template_options"),
            f"{data.origin}: the model's chat template does not show {fields}",
            "what the policy should read belongs into the messages' text",
        )


def _telling(questions: Sequence[Question]) -> list[int]:
    """Return the places of questions to tokenise: all, or if they are many, the first, the longest and one of each form
    of conversation. If a run takes these, it nearly always takes all."""
    if len(questions) <= _MAX_TOKENISED:
        return [*range(len(questions))]
    sizes = [len(one.text) + sum(len(message["content"]) for message in one.messages) for one in questions]
    longest = sorted(range(len(questions)), key=sizes.__getitem__)[-NUM_ROWS:]
    forms = {
        (*((*message, message["role"]) for message in one.messages), bool(one.tools)): number
        for number, one in enumerate(questions)
    }
    return sorted({*range(NUM_ROWS), *longest, *[*forms.values()][:NUM_ROWS]})


def _tokenizer(run: Resolved, model: Path) -> Any:
    """Load the policy's tokenizer; return a violation if it cannot be loaded."""
    from bapo_megatron.hf.tokenizer import load_tokenizer

    try:
        return load_tokenizer(model, run.own)
    except UserError as error:
        return Violation(("model.path",), str(error))
    except Exception as error:  # transformers raises many kinds for a damaged file
        reason = in_one_line(error)
        problem = f"model.path={run.config.model.path}: its tokenizer cannot be loaded: {reason[:300]}"
        return Violation(("model.path",), problem)


def check_judge(config: Config, questions: list[Asked], *, is_complete: bool) -> Iterator[Violation]:
    """Build each judge once, and let it score its questions with sample responses: the questions' own answers, unless
    the judge's module offers others.

    Args:
        is_complete: whether all sources could be read.
    """
    by_spec: list[tuple[JudgeSpec, list[tuple[str, Question]]]] = []
    kind, kinds = config.reward.kind, {config.reward.kind, *config.reward.judges.values()}
    asked_about = ("source", "format") if "auto" in kinds else ("source",) if kinds & {*REWARD.names} else ()
    judges = (
        ("reward.kind", "reward.judges", "reward.weights")
        if config.reward.judges
        else ("reward.kind", "reward.weights")
    )
    settings = (*judges, *(f"{table}.{field}" for table in _sources_read(config) for field in asked_about))
    is_reported = kind == "code" and any(not one.has_rows for one in config.prompt_sources.values())
    try:
        if not is_reported:  # checks/reward.py reports it
            by_spec.append((JudgeSpec.of(config), []))
        for alone, name, question in questions:
            spec = JudgeSpec.of(alone)
            asked = next((asked for other, asked in by_spec if other == spec), None)
            if asked is None:
                by_spec.append((spec, asked := []))
            asked.append((name, question))
    except UserError as error:
        yield Violation((*settings, "data.sources"), str(error))
        return
    for spec, asked in by_spec:
        if is_complete or not spec.datasets:  # it would fail because of what could not be read
            yield from _judge_of(spec, asked, settings)


def _judge_of(spec: JudgeSpec, questions: list[tuple[str, Question]], settings: tuple[str, ...]) -> Iterator[Violation]:
    if spec.kind in EXACT and spec.kind != "text":
        return
    try:
        verdicts = _verdicts(spec, questions)
    except (UserError, RuntimeError) as error:  # RuntimeError: no judge process stays alive
        yield Violation(settings, str(error))
        return
    limits = ("reward.timeout_s", "reward.process_memory_mib")
    for (_, question), verdict in zip(questions, verdicts, strict=True):
        end, what = verdict.end, f'reward.kind="{spec.kind}"'
        where = f"{question.where}, whose sample response was the answer unless the judge's module offers another"
        if verdict.is_misfit:
            problem = f"{what} returned no reward for a first sample, {question.where}: {end.message}"
            yield Violation((*settings, *limits), problem, "correct the judge")
        elif end.problem is not None:
            problem = f"{what} cannot judge a first sample, {where}: {end.message}"
            yield warning((*settings, *limits), problem, _OFFER)
        elif end.reward == 0 and (isinstance(question.answer, str | int | float) or spec.kind not in REWARD.names):
            boxed = " (must it be in \\boxed{}?)" if spec.kind in ("math", "text") else ""
            problem = f"{what} gives 0 to the answer of {question.where} itself{boxed}"
            remedy = _ANSWERED_IN_WORDS if spec.kind == "math" else _OFFER
            yield warning(settings, problem, remedy)


def _stop_tokens(run: Resolved, model: Path) -> Iterator[Violation]:
    """Check that some token ends a turn, and find the tokens that settings name in the tokenizer."""
    config = run.config
    names = (*config.environment.stop_tokens, *config.rollout.ignore_stop_tokens)
    if config.model.path in SHIPPED_MODELS and not names:  # loading a tokenizer takes seconds
        return
    from bapo_megatron.hf.tokenizer import end_token_ids
    from bapo_megatron.prompts.stop_tokens import stop_token_ids

    tokenizer = _tokenizer(run, model)
    if isinstance(tokenizer, Violation):
        yield tokenizer
        return
    settings = ("model.path", "rollout.ignore_stop_tokens", "environment.stop_tokens", "environment.kind")
    try:
        end_ids = end_token_ids(model, tokenizer, run.own)
        stop_token_ids(config, tokenizer, end_ids)
    except CheckpointError as error:
        yield Violation(("model.path",), str(error))
    except UserError as error:
        named = str(error).partition(":")[0]
        first = sorted(settings, key=lambda setting: setting != named)
        yield Violation((*first, "data.chat_template"), str(error))


def _environment(run: Resolved, model: Path | None) -> Iterator[Violation]:
    """Start the environment, and check that the chat template takes the answers of tools."""
    from bapo_megatron.rollout.agents import REWARD_VARIABLE, WRITE, prints_its_reward
    from bapo_megatron.rollout.turn_tokens import check_tools, environment_of

    config = run.config
    limits = ("environment.concurrency", "reward.process_memory_mib")
    try:
        with _unseen_output() as output:
            environment_of(config, output).close()
    except (UserError, RuntimeError) as error:  # RuntimeError: no process stays alive
        yield Violation(("environment.kind", "environment.options", *limits), str(error))
    if config.environment.is_agent and not config.has_judge and (file := prints_its_reward(config.environment.options)):
        problem = f"environment.options: {file} has no {REWARD_VARIABLE}; a reward that it prints does not count"
        yield warning(("environment.options", "reward.kind"), problem, WRITE)
    if model is None or config.environment.kind != "tools":
        return
    tokenizer = _tokenizer(run, model)
    if isinstance(tokenizer, Violation):
        yield tokenizer
        return
    try:
        if tokenizer.chat_template:  # otherwise the prompts have no template either
            check_tools(config, tokenizer)
    except UserError as error:
        yield Violation(("environment.options", "environment.kind", "model.path"), str(error))


_OFFER = "if it expects another form, let its module offer one: def sample_response(answer) -> str"
_ANSWERED_IN_WORDS = 'let the prompts ask for that, or set reward.kind="text", which compares words'


def _verdicts(spec: JudgeSpec, questions: list[tuple[str, Question]]) -> list[Verdict]:
    from bapo_megatron.rewards.worker_pool import WorkerPool
    from bapo_megatron.types import Prompt

    asked = [
        fields_of(Prompt(i, (0,), question.text, question.answer, name), None)
        for i, (name, question) in enumerate(questions)
    ]
    with _unseen_output() as output, contextlib.closing(WorkerPool(spec, 1, output)) as pool:
        return pool.judge(asked)


@contextlib.contextmanager
def _unseen_output() -> Iterator[int]:
    """Yield a descriptor for what a user's function prints; a RuntimeError of the block quotes the last line."""
    with tempfile.TemporaryFile() as file:
        try:
            yield file.fileno()
        except RuntimeError as error:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_QUOTED_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
            last = next(filter(None, map(str.strip, reversed(lines))), "")
            raise RuntimeError(f"{error}; it printed last: {last}" if last else str(error)) from error


def _recording(run: Resolved, model: Path | None, here: bool) -> Iterator[Violation]:
    """Read the first and the last recorded step; every step if it was recorded with a higher limit of responses."""
    config = run.config
    if config.rollout.recorded_from is None:
        return  # checks/rollout.py reports it
    folder, settings = Path(config.rollout.recorded_from).expanduser(), ("rollout.recorded_from", "rollout.engine")
    if not folder.exists():
        if here:
            problem = f"rollout.recorded_from: there is no folder {folder.absolute()}"
            yield Violation(settings, problem, "set it to the `rollouts` folder of a run with rollout.record=true")
        else:
            yield warning(settings, f"rollout.recorded_from={folder} is not on this machine, and was not read")
        return
    from bapo_megatron.rollout.recorded import limit_of_recording, read_groups

    streams = run.kept_streams if model else ()
    last, limit = config.train.num_steps, config.rollout.max_response_tokens
    has_longer = (limit_of_recording(folder) or 0) > limit
    found: set[str] = set()
    for step in range(1, last + 1) if has_longer else (1, last):
        try:
            groups = read_groups(folder, step, streams, limit)
        except UserError as error:
            yield Violation((*settings, "rollout.max_response_tokens", "train.num_steps"), str(error))
            return
        segments = [segment for group in groups for sample in group.samples for _, segment in sample.sampled_segments]
        found.update(stream.name for segment in segments for stream in segment.rows)
    for setting, added in run.added_streams.items() if model else ():
        if lacking := [stream.name for stream in added if stream.name not in found]:
            yield Violation(
                (*settings, setting),
                f"rollout.recorded_from={folder}: the samples have no {' or '.join(lacking)}, which {setting} adds to "
                "samples as they end: a replay adds nothing",
                f"record them again with {setting}, or leave it out",
            )


def _passed_on(run: Resolved) -> Iterator[Violation]:
    """Compare the names in [megatron.extra] and [sglang.extra] with the names that the installed packages declare."""
    config = run.config
    if config.megatron.extra:
        yield from _unknown("megatron.extra", config.megatron.extra, "TransformerConfig", transformer_settings())
    if config.sglang.extra and run.engine.section == "sglang":
        yield from _unknown(
            "sglang.extra", config.sglang.extra, "ServerArgs", server_arguments(), also=("rollout.engine",)
        )


def _unknown(
    setting: str, given: dict[str, Any], owner: str, known: frozenset[str], *, also: tuple[str, ...] = ()
) -> Iterator[Violation]:
    for name in sorted(given.keys() - known) if known else ():
        # SGLang's own parser takes the beginning of a name, and refuses "cuda_graph_max_bs", which has two ends
        longer = sorted(one for one in known if one.startswith(f"{name}_"))
        remedy = did_you_mean(*(f"{setting}.{one}" for one in longer or closest(name, known)))
        problem = f"{setting}.{name} is not a setting of the installed {owner}"
        yield Violation((f"{setting}.{name}", *also), problem, remedy)


@functools.cache
def transformer_settings() -> frozenset[str]:
    """Return the fields of Megatron-Core's TransformerConfig, read from its source; empty if it is not installed."""
    classes = ("ModelParallelConfig", "TransformerConfig")
    files = _sources("megatron", "core/model_parallel_config.py", "core/transformer/transformer_config.py")
    return frozenset(
        name for tree in files for node in tree.body if getattr(node, "name", "") in classes for name in _fields(node)
    )


@functools.cache
def server_arguments() -> frozenset[str]:
    """Return the arguments of SGLang's server, read from its source; empty if it is not installed."""
    names: set[str] = set()
    for tree in _sources("sglang", "srt/server_args.py", "srt/arg_groups/fields/*.py"):
        for node in ast.walk(tree):
            names |= set(_fields(node))
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch("--[a-z0-9-]+", text):  # not a phrase that begins with an option
                names.add(text[2:].replace("-", "_"))
    return frozenset(names)


def _sources(package: str, *patterns: str) -> Iterator[ast.Module]:
    """Parse files of an installed package: this takes milliseconds, importing it takes seconds."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in map(Path, folders or ()):
        for file in (file for pattern in patterns for file in sorted(folder.glob(pattern))):
            yield ast.parse(file.read_text(encoding="utf-8"))


def _fields(node: ast.AST) -> Iterator[str]:
    """Yield the annotated names in the body of a class."""
    for statement in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
