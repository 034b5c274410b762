"""The command line: the table of verbs, and how their errors are reported. verbs.py implements the verbs."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from bapo_megatron import verbs
from bapo_megatron.errors import UserError, closest, did_you_mean, escaped, install_command
from bapo_megatron.runtime import program
from bapo_megatron.runtime.files import located
from bapo_megatron.runtime.output import ESCAPING, Output, lasting, open_closed_streams, show_traceback
from bapo_megatron.version import __version__

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141  # what a shell reports for a program killed by SIGPIPE
_SETTINGS = "CONFIG | KEY=VALUE"


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


def _help(options: argparse.Namespace) -> int:
    """Print a verb's arguments, the list of verbs, or every setting or metric."""
    if options.name in ("settings", "metrics"):
        from bapo_megatron.config.page import metrics_page, settings_page

        print(settings_page() if options.name == "settings" else metrics_page(), end="")
        return 0
    parser = _parser()
    if options.name:
        _check_verb([options.name], [*_verb_parsers(parser), "settings", "metrics"])
        parser = _verb_parsers(parser)[options.name]
    parser.print_help()
    return 0


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


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, from 0 to 65535")
    return int(text)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a verb, as argparse takes it; `completer` proposes values to a shell."""

    names: tuple[str, ...]
    options: dict[str, Any]
    completer: Callable[..., list[str]] | None = None


def argument(*names: str, completer: Callable[..., list[str]] | None = None, **options: Any) -> Argument:
    """Return an argument from what `ArgumentParser.add_argument` takes."""
    return Argument(names, options, completer)


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its summary in the list of verbs, the function that runs it, and its arguments.

    A tuple among the arguments holds mutually exclusive ones.
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    arguments: tuple[Argument | tuple[Argument, ...], ...] = ()
    description: str | None = None
    alias: str | None = None


CONFIGURATION = argument(
    "arguments",
    nargs="*",
    default=[],
    metavar=_SETTINGS,
    completer=_complete_settings,
    help="TOML files or names of shipped configurations (demo), merged in order; then settings to change, "
    "such as parallel.tensor=2",
)
FAMILY = argument("--family", default="auto", metavar="PATH", help="model.family: the path of your own family")
MODEL = (
    argument(
        "model",
        metavar="MODEL",
        help="demo, a run (its newest weights), a Hugging Face folder, or a name on the Hugging Face hub",
    ),
    argument("--max-context", type=_whole, metavar="N", help="longest prompt + response (default: the model's)"),
    argument("--threads", type=_whole, metavar="N", help="CPU threads (default: all cores)"),
    argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: float32)"),
    FAMILY,
)

VERBS = (
    Verb(
        "train",
        "train on this machine; repeating a run.name resumes it",
        verbs.train,
        (CONFIGURATION,),
        description="Starts the engines and trainer ranks of a run on this machine; `bapo launch` is the same verb. "
        "A run on several nodes is submitted with `bapo slurm`.",
        alias="launch",
    ),
    Verb(
        "slurm",
        "write a SLURM job that trains on several nodes, and submit it",
        verbs.slurm,
        (
            CONFIGURATION,
            (
                argument("--submit", action="store_true", help="hand it to sbatch"),
                argument("--dry-run", action="store_true", help="print the script, and write nothing"),
            ),
        ),
        description="Checks, and writes runs/<name>/slurm/job.sbatch. See docs/slurm.md.",
    ),
    Verb(
        "branch",
        "start a new run from a checkpoint of a run, with other settings",
        verbs.branch,
        (
            argument("run", type=Path, metavar="RUN", help="run directory, such as runs/demo; it stays as it is"),
            argument("new", type=Path, metavar="NEW", help="name of the new run, next to RUN; or a path"),
            argument(
                "arguments",
                nargs="*",
                default=[],
                metavar="KEY=VALUE",
                completer=_complete_settings,
                help="settings to change, such as optimizer.lr=1e-6",
            ),
            argument(
                "--step", type=_whole, metavar="N", help="from the checkpoint after N steps (default: the latest)"
            ),
            argument("--dry-run", action="store_true", help="say what the new run would keep, and write nothing"),
        ),
        description="Says what of the checkpoint the new run keeps and what it leaves, and writes its folder, which "
        "`bapo train` then resumes. See docs/resume.md.",
    ),
    Verb("demo", "see a small policy learn on this machine's CPU, in minutes", verbs.demo, (CONFIGURATION,)),
    Verb("check", "list all problems of a configuration, or summarise it", verbs.check, (CONFIGURATION,)),
    Verb(
        "init",
        "write a configuration for a model and a file of prompts, with a layout that fits this machine",
        verbs.init,
        (
            argument("model", metavar="MODEL", help="Hugging Face folder, or a name on the Hugging Face hub"),
            argument(
                "data",
                type=Path,
                metavar="DATA",
                help="prompts: a file (JSON lines, a JSON list, CSV or Parquet), a name on the Hugging Face hub, or "
                "your own function, my_module:my_rows; see docs/data.md",
            ),
            argument(
                "arguments",
                nargs="*",
                default=[],
                metavar="SETTING",
                help="also written to the file, such as data.fields.prompt=question",
            ),
            argument("-o", "--output", type=Path, metavar="FILE", help="new file (default: <model>.toml)"),
        ),
        description="Asks nothing; the file passes `bapo check`. See docs/start.md.",
    ),
    Verb(
        "plan",
        "memory, work and time of a run on its [cluster], and layouts that are faster",
        verbs.plan,
        (
            argument(
                "arguments",
                nargs="*",
                default=[],
                metavar=f"MODEL | {_SETTINGS}",
                completer=_complete_settings,
                help="a model: the name of a published one (Qwen3-8B), or a folder with its config.json; or TOML files "
                "and names of shipped configurations, merged in order; then settings to change",
            ),
            argument(
                "--response-tokens",
                type=_whole,
                metavar="N",
                help="average length of a response (default: the longest allowed)",
            ),
            argument(
                "--best",
                action="store_true",
                help="instead: the split of the GPUs between trainer and servers with the shortest step, whatever the "
                "current layout is",
            ),
            argument("-o", "--output", type=Path, metavar="FILE", help="with --best: new file, to be merged last"),
            argument(
                "--simulate",
                nargs="*",
                metavar="KEY=VALUE",
                help="instead: run the scheduler in simulated time and print step times, idle shares, ages of tokens "
                "and costs; such as steps=50 spread=0.9 usd_per_gpu_hour=2.5; see docs/scale.md",
            ),
            argument("--json", action="store_true", help="with --simulate: print JSON"),
        ),
        description="Needs neither GPUs nor weights, and for a published model no network. See docs/recipes.md.",
    ),
    Verb(
        "doctor",
        "check whether this machine is fit to train, and how to fix it",
        verbs.doctor,
        (
            argument(
                "--config", nargs="+", default=[], metavar="CONFIG | KEY=VALUE", help="also check what this run needs"
            ),
            argument("--rendezvous", metavar="HOST:PORT", help="meet the doctors of other nodes there, on node 0"),
            argument("--num-nodes", type=_whole, default=1, metavar="N", help="doctors that meet (default: 1)"),
            argument("--node-rank", type=int, default=0, metavar="I", help="which of them this is (default: 0)"),
        ),
        description="One line per check. Exit code 0: fit (without GPUs: for CPU use); 1: a check FAILs.",
    ),
    Verb(
        "convert",
        "check a checkpoint, or convert it: Hugging Face <-> training",
        verbs.convert,
        (
            argument("source", type=Path, metavar="SRC", help="Hugging Face folder, run, or training checkpoint"),
            argument("target", type=Path, metavar="DST", nargs="?", help="new folder; without it SRC is only checked"),
            argument("--to", choices=("hf", "training", "peft"), default="hf", help="what DST becomes (default: hf)"),
            argument("--base", type=Path, metavar="FOLDER", help="of adapters: the model's folder, if it has moved"),
            argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in SRC"),
            argument(
                "--max-file-gb",
                type=_positive,
                default=2.0,
                metavar="GB",
                help="largest size of a weight file (default: 2)",
            ),
            FAMILY,
        ),
        description="Check every tensor of SRC; with DST, also write it there. See docs/models.md.",
    ),
    Verb(
        "eval",
        "evaluate a checkpoint on a file of problems: avg@k, pass@k, maj@k",
        verbs.evaluate,
        (
            argument("checkpoint", type=Path, metavar="CKPT", help="Hugging Face folder, run, or checkpoint"),
            CONFIGURATION,
            argument(
                "--data", type=Path, metavar="FILE", help="problems: JSON lines, CSV or Parquet (default: [data])"
            ),
            argument("-n", "--samples", type=_whole, default=16, metavar="N", help="responses each (default: 16)"),
            argument("--limit", type=_whole, metavar="N", help="only the first N problems"),
            argument(
                "--output", type=Path, metavar="FOLDER", help="new folder (default: evals/<date>-<time>-<process>)"
            ),
        ),
        description="Starts engines with the checkpoint's weights. See docs/evaluation.md.",
    ),
    Verb(
        "compare",
        "compare two evaluations, problem by problem",
        verbs.compare,
        (
            argument("before", type=Path, metavar="BEFORE", help="folder that `bapo eval` has written"),
            argument("after", type=Path, metavar="AFTER", help="another one, of the same problems"),
        ),
        description="Paired differences with 95 % intervals. See docs/evaluation.md.",
    ),
    Verb(
        "reproduce",
        "the paper's figures as small studies over seeds, on this machine's CPU",
        verbs.reproduce,
        (
            argument("names", nargs="*", metavar="NAME", help="studies, TOML files, or all; without any, list them"),
            argument(
                "--quick", action="store_true", help="one seed, a few steps, with --in-place: a test that it runs"
            ),
            argument(
                "--at",
                metavar="COMMIT",
                help="the code that trains (default: the code of the finished runs, for a new study HEAD)",
            ),
            argument("--in-place", action="store_true", help="train with the code of this checkout as it is"),
            argument("--output", type=Path, metavar="DIR", help="for the results (default: runs/reproduce/results)"),
            argument("--runs", type=Path, default=Path("runs/reproduce"), metavar="DIR", help="for the runs"),
            argument("--jobs", type=_whole, metavar="N", help="runs at a time (default: one per core)"),
            argument("--timeout-s", type=_positive, default=3600.0, metavar="S", help="for one run (default: 3600)"),
        ),
        description="Trains the missing runs, and writes a page, plots and figures for each study. "
        "See docs/reproduction.md.",
    ),
    Verb(
        "report",
        "write a run's report.html, or compare several runs side by side",
        verbs.report,
        (
            argument("runs", type=Path, nargs="+", metavar="RUN", help="run directory, such as runs/demo"),
            argument(
                "--output", type=Path, metavar="FILE", help="default: RUN/report.html; for many, runs/comparison.html"
            ),
            argument(
                "--serve", action="store_true", help="follow one run in the browser until Ctrl-C, on loopback only"
            ),
            argument("--port", type=_port, default=0, metavar="N", help="with --serve (default: a free one)"),
        ),
        description="One HTML file that opens offline. See docs/report.md.",
    ),
    Verb(
        "serve",
        "serve a model with the embedded engine, with OpenAI's routes",
        verbs.serve,
        (
            *MODEL,
            argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)"),
            argument("--port", type=_port, default=30000, help="0: the system picks one (default: 30000)"),
            argument("--max-running", type=_whole, default=16, metavar="N", help="concurrent responses (default: 16)"),
        ),
        description="Routes: /v1/models, /v1/completions, /v1/chat/completions, and SGLang's /generate. "
        "See docs/evaluation.md.",
    ),
    Verb(
        "chat",
        "talk to a model in this terminal",
        verbs.chat,
        (
            *MODEL,
            argument("--temperature", type=_temperature, default=0.7, metavar="T", help="0: greedy (default: 0.7)"),
            argument(
                "--system", metavar="TEXT", help="system message for the chat template (default: as the run has it)"
            ),
            argument(
                "--tools",
                type=_names,
                metavar="NAMES",
                help="what it may call, such as calculator,python,my_module:search (default: the run's tools)",
            ),
        ),
        description="Ctrl-C stops a reply, Ctrl-D ends.",
    ),
    Verb(
        "completion",
        "print the script that lets a shell complete verbs, options and settings",
        verbs.completion,
        (argument("shell", choices=("bash", "zsh", "fish")),),
        description='bash: add `eval "$(bapo completion bash)"` to ~/.bashrc; zsh: the same, to ~/.zshrc.',
    ),
    Verb("version", "print the version", verbs.version),
    Verb(
        "help",
        "explain a verb, or list all; also every setting, or every metric",
        _help,
        (argument("name", nargs="?", metavar="VERB | settings | metrics"),),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        0 on success, 2 for an error that the user can fix, 130 after Ctrl-C, 141 if the output has no reader any more;
        otherwise the verb's own exit code.
    """
    if open_closed_streams():
        print("bapo: standard output is closed; redirect it to a file or to /dev/null", file=sys.stderr)
        return EXIT_USER_ERROR
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPING)
    sys.excepthook = show_traceback
    output, errors = Output(sys.stdout), cast(TextIO, Output(sys.stderr, with_bars=True))
    with contextlib.redirect_stdout(cast(TextIO, output)), contextlib.redirect_stderr(lasting(errors)):
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
    """Run one verb; if it fails, print why on one line."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_first_commands())
        return 0
    try:
        _check_verb(arguments, _verb_parsers(parser))
        options, unknown = parser.parse_known_args(arguments)
        unknown_options = [text for text in unknown if text.startswith("-")]
        if unknown_options or (unknown and not hasattr(options, "arguments")):
            what = (unknown_options or unknown)[0]
            raise UserError(_explain_option(arguments, what, _verb_parsers(parser)[arguments[0]]))
        if unknown:  # argparse ends the list of settings at the first option
            options.arguments = [*options.arguments, *unknown]  # not +=: the list may be the parser's default
        _check_working_folder()
        return options.verb(options)
    except UserError as error:
        for line in str(error).split("\n"):
            print(f"bapo: {located(escaped(line))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _modules_of_the_framework():
            raise
        how = install_command("train")
        print(f"bapo: the framework needs {error.name}, which is not installed; run {how}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("bapo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _first_commands() -> str:
    """Return the commands to type first."""
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
    """Raise UserError if the working folder was deleted."""
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
    """A parser whose errors are one line, as the verbs' errors are, and whose help reports a closed output."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            (file or sys.stdout).write(located(message))

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def _check_verb(arguments: Sequence[str], names: Collection[str]) -> None:
    """Raise UserError, with a suggestion, unless the first argument is a verb or an option."""
    verb = arguments[0]
    if not verb.startswith("-") and verb not in names:
        advice = did_you_mean(*closest(verb.lower(), names)) or "`bapo help` lists them"
        raise UserError(f"there is no verb {verb!r}; {advice}")


def _explain_option(arguments: Sequence[str], unknown: str, parser: argparse.ArgumentParser) -> str:
    """Suggest what to write for an argument that the verb does not have, such as optimizer.lr=3 for `--lr 3`."""
    option, _, value = unknown.partition("=")
    if not option.startswith("-"):
        return f"unexpected argument {unknown!r}; see `{parser.prog} --help`"
    if meant := did_you_mean(*closest(option, parser._option_string_actions, cutoff=0.75)):
        return f"there is no option {option}; {meant}"
    if any(action.metavar == _SETTINGS for action in parser._actions) and option.startswith("--"):
        from bapo_megatron.config.coming_from import Hint
        from bapo_megatron.config.paths import meant_setting, schema

        path = tuple(option.lstrip("-").replace("-", "_").split("."))
        hint = Hint(".".join(path)) if path in schema() else meant_setting(path)
        if hint is not None and (not hint.setting or hint.remark):  # a value may need another unit
            return f"there is no option {option}; {hint.advice}"
        if hint is not None:
            following = arguments[arguments.index(unknown) + 1 :]
            value = value or next((text for text in following[:1] if "=" not in text and text[:1] != "-"), "VALUE")
            setting = hint.setting if "=" in hint.setting else f"{hint.setting}={value}"
            return f"there is no option {option}; write the setting without dashes: {setting}"
    return f"there is no option {option}; see `{parser.prog} --help`"


def _verb_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _parser() -> argparse.ArgumentParser:
    """Build the parser from the table of verbs."""
    parser = _Parser(prog="bapo", description="RL of language models with BAPO on Megatron-Core.")
    parser.add_argument("-V", "--version", action="version", version=f"bapo-megatron {__version__}")
    by_name = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in VERBS:
        aliases = [verb.alias] if verb.alias else []
        of_verb = by_name.add_parser(verb.name, aliases=aliases, help=verb.summary, description=verb.description)
        of_verb.set_defaults(verb=verb.run)
        for one in verb.arguments:
            if isinstance(one, Argument):
                _add(of_verb, one)
            else:
                group = of_verb.add_mutually_exclusive_group()
                for alternative in one:
                    _add(group, alternative)
    return parser


def _add(parser: argparse._ActionsContainer, one: Argument) -> None:
    action = parser.add_argument(*one.names, **one.options)
    action.completer = one.completer  # type: ignore[attr-defined]
