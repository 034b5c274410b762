"""The verbs of the command line. Heavy imports happen inside a verb, so that --help answers immediately."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import ConfigError, UserError, install_command
from bapo_megatron.runtime import program, stamp
from bapo_megatron.runtime.files import CHECKOUT
from bapo_megatron.version import __version__

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config
    from bapo_megatron.engines.embedded.chat import ChatTools
    from bapo_megatron.engines.embedded.text import TextModel
    from bapo_megatron.resolved import Resolved
    from bapo_megatron.rewards.environments import Environment

_CHAT_TURNS = 10  # that a model takes until it must wait for the next message
_BEGAN_S = time.monotonic()


def _given(options: Namespace) -> list[str]:
    """Return the configurations and settings of the command line; raise UserError if there are none."""
    if not options.arguments:
        raise UserError("give a configuration: a TOML file, or a shipped one such as demo")
    return options.arguments


def train(options: Namespace) -> int:
    """Train on this machine."""
    return _run(_given(options))


def slurm(options: Namespace) -> int:
    """Write a SLURM job, and submit it if asked to."""
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.plan import decided
    from bapo_megatron.runs.resuming import with_pins
    from bapo_megatron.slurm.submit import check_job, describe, make_job, submit

    here = not options.dry_run
    config = load_checked(_given(options), elsewhere=True, here=here, job=lambda config: check_job(config, here=here))
    if not options.dry_run:
        config = with_pins(config)
    config = decided(config)
    job = make_job(config)
    if options.dry_run:
        print(job.script, end="")
        return 0
    job.write()
    for label, value in describe(job, submit(job) if options.submit else []).items():
        print(f"{label:<10} {value}")
    return 0


def branch(options: Namespace) -> int:
    """Say what a branch of a run keeps, and write its folder."""
    from bapo_megatron.branch import plan_branch
    from bapo_megatron.monitor.console import shown_path

    planned = plan_branch(options.run, options.new, options.arguments, options.step)
    for label, value in planned.facts:
        print(f"{label:<10} {value}", flush=True)
    if options.dry_run:
        return 0
    planned.write()
    print(f"{'written':<10} {shown_path(planned.path)}")
    how = ["slurm", "--submit"] if planned.config.cluster.nodes > 1 else ["train"]
    command = [*program(), how[0], shown_path(planned.path / "config.toml"), *how[1:]]
    print(f"{'next':<10} {shlex.join(command)}")
    return 0


_DEMO_SHOWS = """\
That was the whole loop: sampling, judging, clip bounds, updates, new weights to the engines. On a task this small,
bounds that BAPO searches and wide fixed ones learn equally much."""


def demo(options: Namespace) -> int:
    """Train a small policy in a new run folder."""
    code = _run(["demo", f"run.name=demo-{stamp()}", *options.arguments])
    if code == 0 and not options.arguments:  # it may not hold for another task, loss or length
        print(_DEMO_SHOWS)
    return code


def _run(arguments: Sequence[str]) -> int:
    from bapo_megatron.local import train_command

    return train_command(arguments, _BEGAN_S)


def init(options: Namespace) -> int:
    """Write a configuration for a model and prompts."""
    from bapo_megatron.preflight.check import tell
    from bapo_megatron.preflight.starter import this_hardware, write_config

    start = write_config(options.model, options.data, options.output, this_hardware(), options.arguments)
    tell(start.told)
    print(start)
    print(f"{start.file} is written; next: {shlex.join([*program(), 'train', str(start.file)])}")
    return 0


def check(options: Namespace) -> int:
    """Print an outline of a configuration; mistakes in it raise errors."""
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.explain import outline, plan_text
    from bapo_megatron.preflight.plan import planned
    from bapo_megatron.resolved import resolve

    config = load_checked(_given(options), elsewhere=True)
    print(outline(resolve(config)))
    if config.cluster.gpu is not None:
        print(plan_text(planned(config)))
    return 0


def plan(options: Namespace) -> int:
    """Print memory, work and time of a run, or the best split of its GPUs."""
    from bapo_megatron.preflight.explain import explain_plan, outline

    if options.best:
        if options.simulate is not None:
            raise UserError("--best chooses a layout and --simulate runs one; write it with -o, then simulate the file")
        return _plan_best(options)
    if options.output:
        raise UserError("-o writes the layout that --best finds; add --best, or leave it out")
    if options.simulate is not None:
        return _simulate(options)
    if options.json:
        raise UserError("--json prints what --simulate finds; add --simulate, or leave it out")
    run = _planned(options)
    explanation = explain_plan(run, options.response_tokens)
    print(f"{explanation.verdict}\n\n{outline(run)}\n{explanation.needs}")
    if explanation.problems:
        raise ConfigError("\n".join(explanation.problems))
    return 0


def _planned(options: Namespace, ignored: Collection[str] = ()) -> Resolved:
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.known_models import with_model
    from bapo_megatron.preflight.plan import planned

    run = planned(load_checked(with_model(_given(options)), elsewhere=True, memory=False, ignored=ignored))
    asked, most = options.response_tokens, run.config.rollout.max_response_tokens
    if asked is not None and asked > most:
        raise ConfigError(
            f"--response-tokens {asked}: no average can be above rollout.max_response_tokens={most}; give a lower one"
        )
    return run


def _simulate(options: Namespace) -> int:
    from bapo_megatron.simulate.found import simulated
    from bapo_megatron.simulate.settings import read_settings

    settings = read_settings(options.simulate)
    found = simulated(_planned(options), settings, options.response_tokens)
    print(found.to_json() if options.json else found.text)
    return 0


def _plan_best(options: Namespace) -> int:
    from bapo_megatron.preflight.explain import explain_best
    from bapo_megatron.preflight.suggest import CHOSEN
    from bapo_megatron.runtime.files import explaining_os_errors

    file: Path | None = options.output
    if file is not None and file.exists():
        raise UserError(f"{file} exists: give another name with -o, or remove it")
    text, best = explain_best(_planned(options, CHOSEN), options.response_tokens)
    print(text)
    if file is None:
        print(f"\n{best.to_toml()}", end="")
        return 0
    with explaining_os_errors(file, "give another name with -o"), file.open("x", encoding="utf-8") as stream:
        stream.write(best.to_toml())
    print(f"written to {file}")
    return 0


def doctor(options: Namespace) -> int:
    """Check whether this machine is fit to train, and print the findings."""
    from bapo_megatron.preflight.packages import all_installed, check_packages

    packages = check_packages()
    print(packages, flush=True)
    if not all_installed():  # the following checks import them
        return 1
    from bapo_megatron.config.load import load_config, split_arguments
    from bapo_megatron.preflight.doctor import examine, parse_rendezvous, verdict

    config = load_config(*split_arguments(options.config)) if options.config else None
    rendezvous = parse_rendezvous(options.rendezvous, options.num_nodes, options.node_rank)
    findings = [packages]
    for finding in examine(config, rendezvous):
        findings.append(finding)
        print(finding, flush=True)
    text, code = verdict(findings)
    print(text)
    return code


def convert(options: Namespace) -> int:
    """Check a checkpoint, and convert it if a target is given."""
    from bapo_megatron import convert as conversion
    from bapo_megatron.config.families import own_family

    max_file_bytes, own = int(options.max_file_gb * 1e9), own_family(options.family)
    done = conversion.convert(
        options.source,
        options.target,
        to=options.to,
        dtype=options.dtype,
        max_file_bytes=max_file_bytes,
        own=own,
        base=options.base,
    )
    print(done)
    if options.target:
        print(f"written to {options.target}")
    return 0


def evaluate(options: Namespace) -> int:
    """Evaluate a checkpoint, and write the answers."""
    from bapo_megatron.config.load import split_arguments
    from bapo_megatron.evaluation import run

    config = run.eval_config(options.checkpoint, *split_arguments(options.arguments), options.data, options.samples)
    if note := run.note_of_training(config, options.data):
        print(note, file=sys.stderr)
    output = options.output or run.new_folder()
    evaluation = run.evaluate(
        config, options.checkpoint, output, limit=options.limit, tell=lambda text: print(text, file=sys.stderr)
    )
    print(evaluation.table())
    print(f"\nwritten to {output}")
    return 0


def compare(options: Namespace) -> int:
    """Compare two evaluations by problem."""
    from bapo_megatron.evaluation.run import compare

    print(compare(options.before, options.after))
    return 0


def report(options: Namespace) -> int:
    """Write a report, or serve one while its run lasts."""
    from bapo_megatron.report.page import write_comparison, write_report

    run, *others = options.runs
    if options.serve:
        from bapo_megatron.report.serve import serve_report

        if others or options.output:
            raise UserError("--serve follows one run and writes no file; give one run, without --output")
        serve_report(run, options.port, lambda text: print(text, flush=True))
        return 0
    print(write_comparison(options.runs, options.output) if others else write_report(run, options.output))
    return 0


def reproduce(options: Namespace) -> int:
    """Train the runs of studies, and write their pages."""
    if not (CHECKOUT / "studies" / "run.py").is_file():
        raise UserError(
            "the studies are not installed: they are the folder studies/ of the source; run `python -m bapo_megatron "
            "reproduce` in a clone of it, see docs/reproduction.md"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"the studies need matplotlib, which is not installed; run {install_command('studies')}")
    sys.path.insert(0, str(CHECKOUT))
    if options.at is not None and (options.in_place or options.quick):
        raise UserError("--at trains with the code of a commit, --in-place and --quick with this checkout; choose one")
    run = importlib.import_module("studies.run")  # studies/ import the package, never the other way round
    run.reproduce(
        run.Options(
            names=tuple(options.names),
            quick=options.quick,
            output=options.output or options.runs / ("quick" if options.quick else "results"),
            runs_dir=options.runs,
            num_jobs=options.jobs,
            timeout_s=options.timeout_s,
            in_place=options.in_place,
            at=options.at,
        )
    )
    return 0


def serve(options: Namespace) -> int:
    """Serve a model over HTTP."""
    from bapo_megatron.engines.embedded.server import check_address, serve_text

    check_address(options.host, options.port)
    config = _config_of(options.model)
    return serve_text(_model(options, config, options.max_running), host=options.host, port=options.port)


def chat(options: Namespace) -> int:
    """Talk to a model."""
    from bapo_megatron.config.schema import EnvironmentConfig
    from bapo_megatron.engines.embedded import chat as terminal
    from bapo_megatron.rewards.environments import EnvironmentSpec
    from bapo_megatron.rewards.worker_pool import EnvironmentProcesses

    config = _config_of(options.model)
    system = options.system or config.data.system_prompt
    if options.tools:
        asked = EnvironmentConfig(kind="tools", options={"tools": options.tools}, max_turns=_CHAT_TURNS)
        data = config.data.model_copy(update={"chat_template": True})
        config = config.model_copy(update={"environment": asked, "data": data})
    if config.environment.kind != "tools":
        model = _model(options, config, max_running=1)
        terminal.chat(model, temperature=options.temperature, system=system, tools=None)
        return 0
    processes = EnvironmentProcesses(EnvironmentSpec.of(config), concurrency=1)  # mistakes in tools come before a load
    with contextlib.closing(processes) as environment:
        model = _model(options, config, max_running=1)
        tools = _chat_tools(config, model, environment)
        terminal.chat(model, temperature=options.temperature, system=system, tools=tools)
    return 0


def _chat_tools(config: Config, model: TextModel, environment: Environment) -> ChatTools:
    """Return what a conversation needs of tools. Raises UserError if the chat template does not take them."""
    import asyncio

    from bapo_megatron.engines.embedded.chat import ChatTools
    from bapo_megatron.prompts.stop_tokens import chat_of
    from bapo_megatron.prompts.tools import ToolOptions
    from bapo_megatron.rewards.environments import Continue, Failed, TurnJson
    from bapo_megatron.rollout.turn_tokens import check_tools
    from bapo_megatron.runtime.bodies import BadRequestError

    refusal = chat_of(config, model.tokenizer).refusal
    is_asked = refusal("tool") is not None and refusal("user") is None  # then the user's words have the answers
    if is_asked:
        options = config.environment.options | {"role": "user"}
        config = config.model_copy(update={"environment": config.environment.model_copy(update={"options": options})})
    check_tools(config, model.tokenizer)
    schemas = ToolOptions.of(config.environment.options).shown(model.tokenizer, config.data.template_options)

    def answer(text: str, state: object) -> tuple[Sequence[Mapping[str, Any]], Any] | None:
        turn = TurnJson(prompt="", answer=None, source="", number=1, text=text, token_ids=[], end="stop")
        found = asyncio.run(environment.step(turn, state))
        if isinstance(found, Failed):
            raise BadRequestError(f"a tool failed: {found.reason}")
        if not isinstance(found, Continue):
            return None
        messages = found.messages or ()
        if is_asked and messages:
            messages = [{"role": "user", "content": "\n".join(message["content"] for message in messages)}]
        return messages, found.state

    return ChatTools(answer, schemas, config.environment.max_turns)


def _config_of(model: str) -> Config:
    """Return the configuration of a run, or the default one for another model."""
    from bapo_megatron.config.load import load_config
    from bapo_megatron.evaluation.run import config_of

    found = config_of(Path(model))
    return load_config([found] if found is not None else [], [])


def _model(options: Namespace, config: Config, max_running: int) -> TextModel:
    import torch

    from bapo_megatron.config.families import own_family
    from bapo_megatron.convert import hf_folder
    from bapo_megatron.engines.embedded.text import TextModel
    from bapo_megatron.runtime import num_cores

    torch.set_num_threads(1)  # for this thread; the engine has its own
    own = own_family(options.family)
    with hf_folder(options.model, own=own) as (folder, _version):
        return TextModel.load(
            folder,
            name=options.model,
            max_context=options.max_context,
            max_running=max_running,
            dtype=getattr(torch, options.dtype),
            num_threads=options.threads or num_cores(),
            own=own,
            config=config,
        )


def completion(options: Namespace) -> int:
    """Print the script that a shell reads to complete commands."""
    import argcomplete

    print(argcomplete.shellcode(["bapo"], shell=options.shell))
    return 0


def version(options: Namespace) -> int:
    """Print the version."""
    print(f"bapo-megatron {__version__}")
    return 0
