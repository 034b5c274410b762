"""The command line: verbs, no logic. Heavy imports happen inside a verb, so that --help answers at once."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from bapo_megatron.errors import ConfigError, UserError, escaped
from bapo_megatron.runtime import program
from bapo_megatron.runtime.files import CHECKOUT, located
from bapo_megatron.runtime.output import ESCAPING, Output, lasting, open_closed_streams
from bapo_megatron.version import __version__

if TYPE_CHECKING:
    from bapo_megatron.engines.embedded.text import TextModel

_BEGAN_S = time.monotonic()

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141  # what a shell reports of a program that SIGPIPE ends
_SETTINGS = "CONFIG | KEY=VALUE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        0 on success, 2 for an error that the user can fix, 130 after Ctrl-C, 141 once nobody reads the output, else
        the verb's own exit code.
    """
    if open_closed_streams():
        print("bapo: standard output is closed; redirect it to a file or to /dev/null", file=sys.stderr)
        return EXIT_USER_ERROR
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPING)
    output = Output(sys.stdout)
    with contextlib.redirect_stdout(cast(TextIO, output)), contextlib.redirect_stderr(lasting(sys.stderr)):
        try:
            try:
                return _main(argv)
            finally:  # also of --help, which ends by SystemExit
                output.flush()
        except OSError as error:
            if error is not output.problem:
                raise
            if isinstance(error, BrokenPipeError):
                return EXIT_READER_GONE
            what = f"cannot write to standard output: {error.strerror or error}"
            print(f"bapo: {what}; redirect it to a file that has room, or to /dev/null", file=sys.stderr)
            return EXIT_USER_ERROR
        finally:
            if output.problem is not None:
                output.discard()


def _main(argv: Sequence[str] | None) -> int:
    """Run one verb, and say in a line why it could not."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_first_commands())
        return 0
    try:
        _check_verb(arguments, _verbs(parser))
        options, unknown = parser.parse_known_args(arguments)
        unknown_options = [text for text in unknown if text.startswith("-")]
        if unknown_options or (unknown and not hasattr(options, "arguments")):
            what = (unknown_options or unknown)[0]
            raise UserError(_explain_option(arguments, what, _verbs(parser)[arguments[0]]))
        if unknown:  # argparse ends the list of settings at the first option
            options.arguments += unknown
        _check_working_folder()
        return options.verb(options)
    except UserError as error:
        for line in str(error).split("\n"):
            print(f"bapo: {located(escaped(line))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _modules_of_the_framework():
            raise
        how = "pip install 'bapo-megatron[train]'"
        print(f"bapo: the framework needs {error.name}, which is not installed; run {how}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("bapo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _first_commands() -> str:
    """Return what to type first, and next."""
    bapo = shlex.join(program())
    commands = {
        "demo": "watch a small policy learn, on this machine's CPU",
        "init MODEL DATA -o my.toml": "write a configuration for your model and prompts",
        "check my.toml": "list its mistakes before anything starts",
        "train my.toml": "train; the same command again resumes",
        "report --serve runs/my": "follow the run in the browser",
    }
    lines = [f"  {bapo} {command:<28}{what}" for command, what in commands.items()]
    return "\n".join([*lines, "", f"`{bapo} help` lists all verbs, `{bapo} help VERB` explains one."])


def _check_working_folder() -> None:
    """Raise UserError if the folder that relative paths begin in was deleted."""
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(f"the working folder is gone ({error.strerror}); change to one that exists") from error


def _modules_of_the_framework() -> set[str]:
    """Return the modules of the extra "train", which the base installation leaves out."""
    import importlib.metadata

    required = importlib.metadata.requires("bapo-megatron") or []
    names = [re.split(r"[^\w.-]", text)[0] for text in required if 'extra == "train"' in text]
    return {"megatron" if name == "megatron-core" else name.replace("-", "_") for name in names}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the verbs, and whose help does not hide that it is not read."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            (file or sys.stdout).write(located(message))

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def _check_verb(arguments: Sequence[str], verbs: Collection[str]) -> None:
    """Raise UserError, with a suggestion, unless the first argument is a verb or an option."""
    verb = arguments[0]
    if not verb.startswith("-") and verb not in verbs:
        close = difflib.get_close_matches(verb.lower(), verbs, n=1)
        advice = f"did you mean {close[0]}?" if close else "`bapo help` lists them"
        raise UserError(f"there is no verb {verb!r}; {advice}")


def _explain_option(arguments: Sequence[str], unknown: str, parser: argparse.ArgumentParser) -> str:
    """Say what to write for an argument that the verb does not have, such as `--lr 3` for optimizer.lr=3."""
    option, _, value = unknown.partition("=")
    if not option.startswith("-"):
        return f"unexpected argument {unknown!r}; see `{parser.prog} --help`"
    if close := difflib.get_close_matches(option, parser._option_string_actions, n=1, cutoff=0.75):
        return f"there is no option {option}; did you mean {close[0]}?"
    if any(action.metavar == _SETTINGS for action in parser._actions) and option.startswith("--"):
        from bapo_megatron.config.paths import meant_setting, schema

        path = tuple(option.lstrip("-").replace("-", "_").split("."))
        setting = ".".join(path) if path in schema() else meant_setting(path)
        if setting is not None:
            following = arguments[arguments.index(unknown) + 1 :]
            value = value or next((text for text in following[:1] if "=" not in text and text[:1] != "-"), "VALUE")
            setting += "" if "=" in setting else f"={value}"
            return f"there is no option {option}; write the setting without dashes: {setting}"
    return f"there is no option {option}; see `{parser.prog} --help`"


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _complete_settings(prefix: str, **_: object) -> list[str]:
    """Complete shipped configurations, settings, their values, and files."""
    import argcomplete

    from bapo_megatron.config.load import shipped_configs
    from bapo_megatron.config.paths import choices, schema

    setting, equals, _value = prefix.partition("=")
    if equals:
        return [f"{setting}={value}" for value in choices(tuple(setting.split(".")))]
    settings = [f"{'.'.join(path)}=" for path in schema() if len(path) > 1]
    return [*shipped_configs(), *settings, *argcomplete.FilesCompleter(["toml"])(prefix)]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bapo", description="RL of language models with BAPO on Megatron-Core.")
    parser.add_argument("-V", "--version", action="version", version=f"bapo-megatron {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    train = verbs.add_parser(
        "train",
        aliases=["launch"],
        help="train on this machine; the same run.name again resumes",
        description="Starts the engines and trainer ranks of a run on this machine; `bapo launch` is the same verb. "
        "A run on several nodes is submitted with `bapo slurm`.",
    )
    _add_config_arguments(train)
    train.set_defaults(verb=_train)

    slurm = verbs.add_parser(
        "slurm",
        help="write a SLURM job that trains on several nodes, and submit it",
        description="Checks, and writes runs/<name>/slurm/job.sbatch. See docs/slurm.md.",
    )
    _add_config_arguments(slurm)
    how = slurm.add_mutually_exclusive_group()
    how.add_argument("--submit", action="store_true", help="hand it to sbatch")
    how.add_argument("--dry-run", action="store_true", help="print the script, and write nothing")
    slurm.set_defaults(verb=_slurm)

    demo = verbs.add_parser("demo", help="see a small policy learn on this machine's CPU, in minutes")
    _add_config_arguments(demo)
    demo.set_defaults(verb=_demo)

    check = verbs.add_parser("check", help="list all problems of a configuration, or summarise it")
    _add_config_arguments(check)
    check.set_defaults(verb=_check)

    init = verbs.add_parser(
        "init",
        help="write a configuration for a model and a file of prompts, with a layout that fits this machine",
        description="Asks nothing; the file passes `bapo check`. See docs/start/one-node.md.",
    )
    init.add_argument("model", metavar="MODEL", help="Hugging Face folder, or a name on the Hugging Face hub")
    init.add_argument(
        "data",
        type=Path,
        metavar="DATA",
        help="prompts: a file (JSON lines, a JSON list, CSV or Parquet), a name on the Hugging Face hub, or a function "
        "of your own, my_module:my_rows; see docs/data.md",
    )
    init.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="SETTING",
        help="to write too, before -o, such as data.fields.prompt=question",
    )
    init.add_argument("-o", "--output", type=Path, metavar="FILE", help="new file (default: <model>.toml)")
    init.set_defaults(verb=_init)

    plan = verbs.add_parser(
        "plan",
        help="memory, work and time of a run on its [cluster], and layouts that are faster",
        description="Needs neither GPUs nor the weights of a model that a shipped recipe names. See docs/recipes.md.",
    )
    _add_config_arguments(plan)
    plan.add_argument(
        "--response-tokens", type=_whole, metavar="N", help="average length of a response (default: as long as allowed)"
    )
    plan.add_argument(
        "--best",
        action="store_true",
        help="instead: the split of the GPUs over trainer and servers with the shortest step, whatever the layout is",
    )
    plan.add_argument("-o", "--output", type=Path, metavar="FILE", help="of --best: new file, to merge last")
    plan.set_defaults(verb=_plan)

    doctor = verbs.add_parser(
        "doctor",
        help="check whether this machine is fit to train, and how to fix it",
        description="One line per check. Exit code 0: fit, for CPU use on a machine without GPUs; 1: a check FAILs.",
    )
    doctor.add_argument(
        "--config", nargs="+", default=[], metavar="CONFIG | KEY=VALUE", help="also check what this run needs"
    )
    doctor.add_argument(
        "--port", type=_whole, action="append", default=[], metavar="PORT", help="check that it is free"
    )
    doctor.add_argument("--versions", action="store_true", help="only compare packages with requirements/")
    doctor.add_argument("--rendezvous", metavar="HOST:PORT", help="meet the doctors of other nodes there, on node 0")
    doctor.add_argument("--num-nodes", type=_whole, default=1, metavar="N", help="doctors that meet (default: 1)")
    doctor.add_argument("--node-rank", type=int, default=0, metavar="I", help="which of them this is (default: 0)")
    doctor.set_defaults(verb=_doctor)

    convert = verbs.add_parser(
        "convert",
        help="check a checkpoint, or convert it: Hugging Face <-> training",
        description="Check every tensor of SRC; with DST, also write it there. See docs/models.md.",
    )
    convert.add_argument("source", type=Path, metavar="SRC", help="Hugging Face folder, run, or training checkpoint")
    convert.add_argument(
        "target", type=Path, metavar="DST", nargs="?", help="new folder; without it SRC is only checked"
    )
    convert.add_argument("--to", choices=("hf", "training"), default="hf", help="what DST becomes (default: hf)")
    convert.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as SRC has it")
    convert.add_argument(
        "--max-file-gb", type=_positive, default=2.0, metavar="GB", help="size of a file of weights (default: 2)"
    )
    _add_family(convert)
    convert.set_defaults(verb=_convert)

    evaluate = verbs.add_parser(
        "eval",
        help="evaluate a checkpoint on a file of problems: avg@k, pass@k, maj@k",
        description="Starts engines with the checkpoint's weights. See docs/evaluation.md.",
    )
    evaluate.add_argument("checkpoint", type=Path, metavar="CKPT", help="Hugging Face folder, run, or checkpoint")
    _add_config_arguments(evaluate)
    evaluate.add_argument(
        "--data", type=Path, metavar="FILE", help="problems: JSON lines, CSV or Parquet (default: [data])"
    )
    evaluate.add_argument("-n", "--samples", type=_whole, default=16, metavar="N", help="responses each (default: 16)")
    evaluate.add_argument("--limit", type=_whole, metavar="N", help="only the first N problems")
    evaluate.add_argument("--output", type=Path, metavar="FOLDER", help="new folder (default: evals/<date>-<time>)")
    evaluate.set_defaults(verb=_eval)

    reproduce = verbs.add_parser(
        "reproduce",
        help="the paper's figures as small studies over seeds, on this machine's CPU",
        description="Trains the missing runs, and writes a page, plots and figures for each study. See docs/bapo.md.",
    )
    reproduce.add_argument("names", nargs="*", metavar="NAME", help="studies, or TOML files, or all; none: list them")
    reproduce.add_argument("--quick", action="store_true", help="one seed, a few steps: a test that it runs")
    reproduce.add_argument(
        "--output", type=Path, metavar="DIR", help="for the results (default: runs/reproduce/results)"
    )
    reproduce.add_argument("--runs", type=Path, default=Path("runs/reproduce"), metavar="DIR", help="for the runs")
    reproduce.add_argument("--jobs", type=_whole, metavar="N", help="runs at a time (default: one a core)")
    reproduce.add_argument(
        "--timeout-s", type=_positive, default=3600.0, metavar="S", help="of one run (default: 3600)"
    )
    reproduce.set_defaults(verb=_reproduce)

    report = verbs.add_parser(
        "report",
        help="write a run's report.html; of several runs, put them side by side",
        description="One HTML file that opens offline. See docs/report.md.",
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directory, such as runs/demo")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="default: RUN/report.html, of several runs/comparison.html"
    )
    report.add_argument(
        "--serve", action="store_true", help="follow one run in the browser until Ctrl-C, on loopback only"
    )
    report.add_argument("--port", type=_port, default=0, metavar="N", help="of --serve; default: a free one")
    report.set_defaults(verb=_report)

    serve = verbs.add_parser(
        "serve",
        help="serve a model with the embedded engine, with OpenAI's routes",
        description="Routes: /v1/models, /v1/completions, /v1/chat/completions, and SGLang's /generate. "
        "See docs/serving.md.",
    )
    _add_model_arguments(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=_port, default=30000, help="0: the system picks one (default: 30000)")
    serve.add_argument(
        "--max-running", type=_whole, default=16, metavar="N", help="responses at once; more wait (default: 16)"
    )
    serve.set_defaults(verb=_serve)

    chat = verbs.add_parser(
        "chat",
        help="talk to a model in this terminal",
        description="Ctrl-C stops a reply, Ctrl-D ends.",
    )
    _add_model_arguments(chat)
    chat.add_argument("--temperature", type=_temperature, default=0.7, metavar="T", help="0: greedy (default: 0.7)")
    chat.add_argument("--system", metavar="TEXT", help="system message for the chat template")
    chat.set_defaults(verb=_chat)

    completion = verbs.add_parser(
        "completion",
        help="print what makes a shell complete verbs, options and settings",
        description='bash: add `eval "$(bapo completion bash)"` to ~/.bashrc; zsh: the same, to ~/.zshrc.',
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(verb=_completion)

    version = verbs.add_parser("version", help="print the version")
    version.set_defaults(verb=_version)

    about = verbs.add_parser("help", help="explain a verb, or list all")
    about.add_argument("name", nargs="?", metavar="VERB")
    about.set_defaults(verb=_help)
    return parser


def _add_family(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family", default="auto", metavar="PATH", help="model.family: the path of a family of your own"
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="demo, a run (its newest weights), a Hugging Face folder, or a name on the Hugging Face hub",
    )
    parser.add_argument(
        "--max-context", type=_whole, metavar="N", help="longest prompt + response (default: the model's)"
    )
    parser.add_argument("--threads", type=_whole, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")
    _add_family(parser)


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not 0 or above")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, from 0 to 65535")
    return int(text)


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    arguments = parser.add_argument(
        "arguments",
        nargs="*",
        default=[],
        metavar=_SETTINGS,
        help="TOML files or names of shipped configurations (demo), merged in order; then settings to change, "
        "such as parallel.tensor=2",
    )
    arguments.completer = _complete_settings  # type: ignore[attr-defined]


def _given(options: argparse.Namespace) -> list[str]:
    """Return the configurations and settings of the command line; raise UserError if there are none."""
    if not options.arguments:
        raise UserError("give a configuration: a TOML file, or a shipped one such as demo")
    return options.arguments


def _train(options: argparse.Namespace) -> int:
    return _run(_given(options))


def _slurm(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.runs.resuming import with_pinned_models
    from bapo_megatron.slurm.submit import check_job, describe, make_job, submit

    here = not options.dry_run
    config = load_checked(_given(options), elsewhere=True, here=here, job=lambda config: check_job(config, here=here))
    if not options.dry_run:
        config = with_pinned_models(config)
    job = make_job(config)
    if options.dry_run:
        print(job.script, end="")
        return 0
    job.write()
    for label, value in describe(job, submit(job) if options.submit else []).items():
        print(f"{label:<10} {value}")
    return 0


_DEMO_SHOWS = """\
That was the whole loop: sampling, judging, clip bounds, updates, new weights to the engines. On a task this small,
bounds that BAPO searches and wide fixed ones learn equally much."""


def _demo(options: argparse.Namespace) -> int:
    name = f"run.name=demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"  # two may start in the same second
    code = _run(["demo", name, *options.arguments])
    if code == 0 and not options.arguments:  # it may be untrue of another task, loss or length
        print(_DEMO_SHOWS)
    return code


def _run(arguments: Sequence[str]) -> int:
    from bapo_megatron.local import train_command

    return train_command(arguments, _BEGAN_S)


def _init(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.starter import this_hardware, write_config

    start = write_config(options.model, options.data, options.output, this_hardware(), options.settings)
    print(start)
    print(f"{start.file} is written; next: {shlex.join([*program(), 'train', str(start.file)])}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.explain import outline, plan_text

    config = load_checked(_given(options), elsewhere=True)
    print(outline(config))
    if config.cluster.gpu is not None:
        print(plan_text(config))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.explain import explain_plan, outline

    if options.best:
        return _plan_best(options)
    if options.output:
        raise UserError("-o writes the layout that --best finds; add --best, or leave it out")
    config = load_checked(_given(options), elsewhere=True, memory=False)
    explanation = explain_plan(config, options.response_tokens)
    print(f"{explanation.verdict}\n\n{outline(config)}\n{explanation.needs}")
    if explanation.problems:
        raise ConfigError("\n".join(explanation.problems))
    return 0


def _plan_best(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.explain import explain_best
    from bapo_megatron.preflight.plan import CHOSEN
    from bapo_megatron.runtime.files import explaining_os_errors

    file: Path | None = options.output
    if file is not None and file.exists():
        raise UserError(f"{file} exists: give another name with -o, or remove it")
    config = load_checked(_given(options), elsewhere=True, memory=False, ignored=CHOSEN)
    text, best = explain_best(config, options.response_tokens)
    print(text)
    if file is None:
        print(f"\n{best.to_toml()}", end="")
        return 0
    with explaining_os_errors(file, "give another name with -o"), file.open("x", encoding="utf-8") as stream:
        stream.write(best.to_toml())
    print(f"written to {file}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.packages import Stack, check_required, check_versions, table

    packages = check_required()
    if options.versions:
        from bapo_megatron.preflight.software_checks import read_driver

        stack: Stack = "gpu" if read_driver().gpus else "cpu"
        print("\n".join(table(stack)))
        return int("error" in (packages.verdict, check_versions(stack).verdict))
    print(packages, flush=True)
    if packages.verdict == "error":  # the following checks import them
        return 1
    from bapo_megatron.config.load import load_config, split_arguments
    from bapo_megatron.preflight.doctor import examine, parse_rendezvous, verdict

    config = load_config(*split_arguments(options.config)) if options.config else None
    rendezvous = parse_rendezvous(options.rendezvous, options.num_nodes, options.node_rank)
    findings = [packages]
    for finding in examine(config, options.port, rendezvous):
        findings.append(finding)
        print(finding, flush=True)
    text, code = verdict(findings)
    print(text)
    return code


def _convert(options: argparse.Namespace) -> int:
    from bapo_megatron.config.families import own_family
    from bapo_megatron.convert import convert

    max_file_bytes, own = int(options.max_file_gb * 1e9), own_family(options.family)
    done = convert(
        options.source, options.target, to=options.to, dtype=options.dtype, max_file_bytes=max_file_bytes, own=own
    )
    print(done)
    if options.target:
        print(f"written to {options.target}")
    return 0


def _eval(options: argparse.Namespace) -> int:
    from bapo_megatron.config.load import split_arguments
    from bapo_megatron.evaluation.run import eval_config, evaluate, note_of_training

    config = eval_config(options.checkpoint, *split_arguments(options.arguments), options.data, options.samples)
    if note := note_of_training(config, options.data):
        print(note, file=sys.stderr)
    output = options.output or Path("evals") / time.strftime("%Y%m%d-%H%M%S")
    evaluation = evaluate(
        config, options.checkpoint, output, limit=options.limit, tell=lambda text: print(text, file=sys.stderr)
    )
    print(evaluation.table())
    print(f"\nwritten to {output}")
    return 0


def _report(options: argparse.Namespace) -> int:
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


def _reproduce(options: argparse.Namespace) -> int:
    if not (CHECKOUT / "studies" / "run.py").is_file():
        raise UserError(
            "the studies are not installed: they are the folder studies/ of the source; run `python -m bapo_megatron "
            "reproduce` in a clone of it, see docs/reproduction/README.md"
        )
    sys.path.insert(0, str(CHECKOUT))
    run = importlib.import_module("studies.run")  # studies/ import the package, never the other way round
    run.reproduce(
        run.Options(
            names=tuple(options.names),
            quick=options.quick,
            output=options.output or options.runs / "results",
            runs_dir=options.runs,
            num_jobs=options.jobs,
            timeout_s=options.timeout_s,
        )
    )
    return 0


def _serve(options: argparse.Namespace) -> int:
    from bapo_megatron.engines.embedded.server import check_address, serve_text

    check_address(options.host, options.port)
    return serve_text(_model(options, options.max_running), host=options.host, port=options.port)


def _chat(options: argparse.Namespace) -> int:
    from bapo_megatron.engines.embedded.chat import chat

    chat(_model(options, max_running=1), temperature=options.temperature, system=options.system)
    return 0


def _model(options: argparse.Namespace, max_running: int) -> TextModel:
    import torch

    from bapo_megatron.config.families import own_family
    from bapo_megatron.convert import hf_folder
    from bapo_megatron.engines.embedded.text import TextModel
    from bapo_megatron.runtime import num_cores

    torch.set_num_threads(1)  # of this thread: the engine has one of its own
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
        )


def _completion(options: argparse.Namespace) -> int:
    import argcomplete

    print(argcomplete.shellcode(["bapo"], shell=options.shell))
    return 0


def _help(options: argparse.Namespace) -> int:
    parser = _parser()
    if options.name:
        _check_verb([options.name], _verbs(parser))
        parser = _verbs(parser)[options.name]
    parser.print_help()
    return 0


def _version(options: argparse.Namespace) -> int:
    print(f"bapo-megatron {__version__}")
    return 0
