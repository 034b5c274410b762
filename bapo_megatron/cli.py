"""The command line: verbs, no logic. Heavy imports happen inside a verb, so that --help answers at once."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron import __version__
from bapo_megatron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from bapo_megatron.config.schema import Config

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        0 on success, 2 for an error that the user can fix, 130 after Ctrl-C, else the verb's own exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["serve"]:  # the engine has its own parser
            return _serve(arguments[1:])
        options = _parser().parse_args(arguments)
        return options.verb(options)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"bapo: {line}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("bapo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bapo", description="RL of language models with BAPO on Megatron-Core.")
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
    demo.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings to change, such as train.num_steps=3")
    demo.set_defaults(verb=_demo)

    check = verbs.add_parser("check", help="list all problems of a configuration, or summarise it")
    _add_config_arguments(check)
    check.set_defaults(verb=_check)

    plan = verbs.add_parser(
        "plan",
        help="memory, work and time of a run on its [cluster], and layouts that are faster",
        description="Needs neither GPUs nor the weights of a model that a shipped recipe names. See docs/recipes.md.",
    )
    _add_config_arguments(plan)
    plan.add_argument(
        "--response-tokens", type=_whole, metavar="N", help="average length of a response (default: as long as allowed)"
    )
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
    convert.set_defaults(verb=_convert)

    evaluate = verbs.add_parser(
        "eval",
        help="evaluate a checkpoint on a file of problems: avg@k, pass@k, maj@k",
        description="Starts engines with the checkpoint's weights. See docs/evaluation.md.",
    )
    evaluate.add_argument("checkpoint", type=Path, metavar="CKPT", help="Hugging Face folder, run, or checkpoint")
    evaluate.add_argument("arguments", nargs="*", metavar="CONFIG | KEY=VALUE", help="settings, as for train")
    evaluate.add_argument("--data", type=Path, metavar="FILE", help="problems, JSONL or Parquet (default: [data])")
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
    report.add_argument("--port", type=int, default=0, metavar="N", help="of --serve; default: a free one")
    report.set_defaults(verb=_report)

    verbs.add_parser("serve", help="serve a model with the embedded engine (bapo serve --help)", add_help=False)

    version = verbs.add_parser("version", help="print the version")
    version.set_defaults(verb=_version)
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="CONFIG | KEY=VALUE",
        help="TOML files or names of shipped configurations (demo), merged in order; then settings to change, "
        "such as parallel.tensor=2",
    )


def _train(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.check import load_checked

    return _run(load_checked(options.arguments))


def _slurm(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.slurm.submit import describe, prepare, submit

    config = load_checked(options.arguments, elsewhere=True)
    job, warnings = prepare(config)
    for warning in warnings:
        print(f"bapo: warning: {warning.message}", file=sys.stderr)
    if options.dry_run:
        print(job.script, end="")
        return 0
    job.write()
    for label, value in describe(job, submit(job) if options.submit else []).items():
        print(f"{label:<10} {value}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from bapo_megatron.preflight.check import load_checked

    name = time.strftime("run.name=demo-%Y%m%d-%H%M%S")
    return _run(load_checked(["demo", name, *options.overrides]))


def _run(config: Config) -> int:
    from bapo_megatron.local import run

    return run(config)


def _check(options: argparse.Namespace) -> int:
    from bapo_megatron.config.plan import summarize
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.report import describe

    config = load_checked(options.arguments, elsewhere=True)
    print(summarize(config))
    if config.cluster.gpu is not None:
        print(describe(config))
    return 0


def _plan(options: argparse.Namespace) -> int:
    from bapo_megatron.config.plan import summarize
    from bapo_megatron.preflight.check import load_checked
    from bapo_megatron.preflight.report import explain

    config = load_checked(options.arguments, elsewhere=True, memory=False)
    print(summarize(config))
    text, problems = explain(config, options.response_tokens)
    print(text)
    if problems:
        raise ConfigError("\n".join(problems))
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
    from bapo_megatron.convert import convert

    max_file_bytes = int(options.max_file_gb * 1e9)
    print(convert(options.source, options.target, to=options.to, dtype=options.dtype, max_file_bytes=max_file_bytes))
    if options.target:
        print(f"written to {options.target}")
    return 0


def _eval(options: argparse.Namespace) -> int:
    from bapo_megatron.config.load import split_arguments
    from bapo_megatron.evaluation.run import eval_config, evaluate

    config = eval_config(options.checkpoint, *split_arguments(options.arguments), options.data, options.samples)
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
        from bapo_megatron.report.serve import serve

        if others or options.output:
            raise UserError("--serve follows one run and writes no file; give one run, without --output")
        serve(run, options.port, lambda text: print(text, flush=True))
        return 0
    print(write_comparison(options.runs, options.output) if others else write_report(run, options.output))
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from bapo_megatron.reproduce import run

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


def _serve(arguments: Sequence[str]) -> int:
    from bapo_megatron.engines.embedded import server

    server.main(list(arguments))
    return 0


def _version(options: argparse.Namespace) -> int:
    print(f"bapo-megatron {__version__}")
    return 0
