"""A configuration from the command line, checked for this machine or for the cluster that it names."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo_megatron.assets import SHIPPED_MODELS, hub, resolve_model_path
from bapo_megatron.config.base import Severity, Violation, overlap, warning
from bapo_megatron.config.engines import ENGINE_CHECK, EngineKind
from bapo_megatron.config.load import read_config, split_arguments
from bapo_megatron.config.losses import stand_in
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import sglang_kernels
from bapo_megatron.errors import CheckpointError, ConfigError, TornCheckpointError, UserError, escaped
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import VALUE_HEAD
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.learner import REMOVE_ENGINE
from bapo_megatron.learner.fit import check_tokenizers
from bapo_megatron.learner.precision import this_machine
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.checks.functions import check_functions
from bapo_megatron.preflight.checks.layout import RANKS
from bapo_megatron.preflight.checks.slurm import (
    check_node_gpus,
    check_nodes,
    check_placement,
    check_shares,
    several_nodes,
)
from bapo_megatron.preflight.inputs import Findings, read_inputs
from bapo_megatron.preflight.known_models import known_config, origin
from bapo_megatron.preflight.machine_checks import check_host_memory, check_open_files, check_room
from bapo_megatron.preflight.plan import check_devices, check_machines, check_memory, check_unused
from bapo_megatron.preflight.reads import reads
from bapo_megatron.preflight.software_checks import (
    REBUILD_ENGINE,
    check_megatron,
    check_memory_saver,
    driver_problem,
    read_driver,
    transformer_engine_problem,
    update_driver,
)
from bapo_megatron.preflight.teacher import check_served_teacher
from bapo_megatron.preflight.trial import try_loss
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.resuming import has_results, num_steps_saved
from bapo_megatron.runtime.environment import has_gpu_driver
from bapo_megatron.runtime.files import located

# Decide whether a layout is possible. No computation of its memory can note them: an impossible layout has none.
_LAYOUT = (
    *RANKS,
    *("parallel.virtual_pipeline", "parallel.last_stage_layers", "parallel.expert", "parallel.sequence"),
    *("train.minibatches_per_step", "model.path", "model.family", "teacher.path", "teacher.path_by_source"),
    *("cluster", "slurm.rollout_nodes"),
)
_ENOUGH_GPUS = 1_000_000  # no limit: the number of ranks does not change


CheckJob = Callable[[Config], Iterable[Violation]]
"""Finds what is wrong with a run's SLURM job."""


def load_checked(
    arguments: Sequence[str],
    *,
    elsewhere: bool = False,
    here: bool | None = None,
    memory: bool = True,
    job: CheckJob | None = None,
    ignored: Collection[str] = (),
) -> Config:
    """Load and check a configuration, print warnings and notes, and raise ConfigError with every problem.

    Args:
        elsewhere, here, memory, job: see `violations_of`.
        ignored: see `read_and_check`.
    """
    config, found = read_and_check(arguments, elsewhere=elsewhere, here=here, memory=memory, job=job, ignored=ignored)
    tell(found)
    if errors := [v.message for v in found if v.severity == "error"]:
        raise ConfigError("\n".join(errors))
    return config


def tell(found: Iterable[Violation]) -> None:
    """Print warnings, and notes to the output."""
    for violation in found:
        if violation.severity != "error":
            file = sys.stderr if violation.severity == "warning" else sys.stdout
            print(f"bapo: {violation.severity}: {located(escaped(violation.message))}", file=file)


def read_and_check(
    arguments: Sequence[str],
    *,
    elsewhere: bool = False,
    here: bool | None = None,
    memory: bool = True,
    job: CheckJob | None = None,
    ignored: Collection[str] = (),
) -> tuple[Config, list[Violation]]:
    """Return a configuration without its invalid settings, and everything that is wrong with the given one.

    Args:
        elsewhere, here, memory, job: see `violations_of`.
        ignored: settings whose values do not matter, as long as they can be read.
    """
    reading = read_config(*split_arguments(arguments))
    found = violations_of(
        reading.config,
        elsewhere=elsewhere,
        here=here,
        memory=memory,
        job=job,
        given=reading.given,
        unread=reading.unread,
    )
    told = [_with_file(v, reading.files) for v in found if not v.depends_on(ignored)]
    return reading.config, [*reading.violations, *told]


def _with_file(violation: Violation, files: Mapping[str, str]) -> Violation:
    """If there are several files, name the one that contains the setting to change."""
    setting = violation.settings[0]
    if violation.severity != "error" or setting not in files:
        return violation
    where = f" ({setting} is from {files[setting]})"
    last = "remedy" if violation.remedy else "problem"
    return replace(violation, **{last: getattr(violation, last) + where})


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the settings. It is skipped if an earlier error asks for a change of a setting that it needs."""

    find: Callable[[], Iterable[Violation]]
    needs: tuple[str, ...] = ()  # settings or tables


def violations_of(
    config: Config,
    *,
    elsewhere: bool,
    here: bool | None = None,
    memory: bool = True,
    job: CheckJob | None = None,
    given: Collection[str] | None = None,
    unread: Collection[str] = frozenset(),
    read: Findings | None = None,
) -> list[Violation]:
    """List every violation that can be found before the run starts.

    A setting whose value is unknown has its default here, and violations that depend on it are not reported.

    Args:
        elsewhere: check for the configuration's cluster, if it names one, instead of this machine, on which the run
            need not start.
        here: whether models and data must be on this machine; None means unless the check is for a cluster.
        memory: whether exceeding the memory of the cluster's GPUs is a violation; if not, the check reads no data, and
            only the config.json of a model.
        job: checks the rest of the run's SLURM job, if it has one.
        given: see `check_settings`.
        unread: settings whose values could not be read, so that only their defaults are known.
        read: findings about data and judge from earlier calls.
    """
    starts_here = not elsewhere
    nodes = config.cluster.nodes
    is_job = nodes > 1 or job is not None
    elsewhere = (elsewhere or nodes > 1) and (config.cluster.gpu is not None or "cluster.gpu" in unread)
    here = not elsewhere if here is None else here
    found = [*([several_nodes(config)] if starts_here and nodes > 1 else []), *check_functions(config)]
    found = [v for v in found if not v.depends_on(unread)]
    if any(v.depends_on(["rollout.engine"]) for v in found):
        config, unread = _with_default(config, "rollout", "engine"), {*unread, "rollout.engine"}
    if any(v.depends_on(["model.family"]) for v in found):
        config, unread = _with_default(config, "model", "family"), {*unread, "model.family", "model.path"}
    if any(v.depends_on(["loss.name"]) for v in found):
        config, unread = config.model_copy(update={"loss": stand_in(config.loss)}), {*unread, "loss.name"}
    known = known_config(config.model.path) if (elsewhere and not here) or not memory else None
    model = None if known else _model(config.model.path, "model.path", found, config_only=not memory)
    hf_config = known or _hf_config(model or _incomplete(config.model.path), "model.path", found)
    critic = None if config.advantage.compares_responses else config.critic.path
    reference = config.loss.reference_path if config.loss.kl_coef else None
    others = {"critic.path": critic, "loss.reference_path": reference, **config.teacher.paths}
    run = resolve(config, hf_config)
    folders = {
        setting: _model(path, setting, found, config_only=not memory)
        for setting, path in others.items()
        if path is not None and not (known and known_config(path))
    }
    facts = {
        setting: ModelFacts(other, run.own)
        for setting, path in others.items()
        if path is not None
        and (
            other := _hf_config(folders[setting] or _incomplete(path), setting, found)
            if setting in folders
            else known_config(path)
        )
    }
    paths = config.teacher.paths
    run = replace(run, teachers={path: facts[setting] for setting, path in paths.items() if setting in facts})
    num_gpus = nodes * config.cluster.gpus_per_node if elsewhere else num_visible_gpus()
    if has_gpu_driver() and not (elsewhere or num_gpus):
        found += (outdated := [*_check_driver(config)])
        if any(v.severity == "error" for v in outdated):
            num_gpus = _ENOUGH_GPUS  # torch would see them with another driver
    tokenizer_from = model if run.model is not None and not run.model.problems else None
    is_dry = job is not None and not here
    split = ("cluster", *reads(run, lambda run: run.placement))
    checks = [
        Check(lambda: _absent(config, known is not None) if is_dry else ()),
        Check(lambda: _check_installed(run.engine, bool(num_gpus)) if not (elsewhere or is_job) else ()),
        Check(lambda: _check_memory_saver(run) if num_gpus and not (elsewhere or is_job) else ()),
        Check(
            lambda: _check_kernels(run.engine, model) if num_gpus and not (elsewhere or is_job) else (),
            needs=("rollout.engine",),
        ),
        Check(lambda: _check_transformer_engine() if not (elsewhere or is_job) else ()),
        Check(
            lambda: check_settings(
                run,
                reference=facts.get("loss.reference_path"),
                critic=facts.get("critic.path"),
                num_gpus=num_gpus,
                starts_here=starts_here and nodes == 1,
                machine=this_machine() if num_gpus and not elsewhere else None,
                given=given,
            )
        ),
        Check(lambda: check_nodes(run) if is_job else (), needs=split),
        Check(lambda: check_shares(config) if is_job else (), needs=("cluster.nodes",)),
        Check(lambda: read_inputs(run, tokenizer_from, {} if read is None else read, here=here) if memory else ()),
        Check(
            lambda: (
                _check_weights({"model.path": config.model.path} | others, folders | {"model.path": model}, run, facts)
                if memory
                else ()
            ),
            needs=("model.path", "model.family"),
        ),
        Check(
            lambda: _check_teachers(run, folders, model) if memory else (),
            needs=("teacher.path", "teacher.path_by_source", "model"),
        ),
        Check(
            lambda: (
                check_served_teacher(run, tokenizer_from, here=here, asks=not (elsewhere or is_job)) if memory else ()
            ),
            needs=("teacher.urls", "teacher.urls_by_source", "teacher.hint", "teacher.api_key", "model", "data"),
        ),
        Check(lambda: try_loss(run, elsewhere=elsewhere) if memory else ()),
        Check(lambda: _check_resume(run) if memory and not unread else (), needs=("model",)),
        Check(lambda: check_open_files(run) if nodes == 1 and not elsewhere else ()),
        Check(
            lambda: check_room(run) if starts_here and nodes == 1 and memory and hf_config else (),
            needs=("model",),
        ),
        Check(
            lambda: (
                check_host_memory(run, starts_here=starts_here and nodes == 1 and job is None)
                if memory and hf_config
                else ()
            ),
            needs=(*_LAYOUT, "sync.folder"),
        ),
        Check(lambda: check_machines(run)),
        Check(lambda: check_devices(run)),
        Check(lambda: check_node_gpus(run) if nodes > 1 else (), needs=split),
        Check(lambda: check_memory(run) if memory and hf_config else (), needs=_LAYOUT),
        Check(lambda: check_unused(run), needs=split),
        Check(lambda: job(config) if job else ()),
    ]
    # Example: with parallel.tensor="two" it is 1 here, and parallel.sequence=true seems wrong. That stays untold.
    untold: list[Violation] = []  # found with a default for an unknown value; later checks cannot pass them either
    for one in checks:
        wrong = {v.settings[0] for v in (*found, *untold) if v.severity == "error"}
        if not overlap(one.needs, wrong):
            for violation in one.find():
                (untold if violation.depends_on(unread) else found).append(violation)
    return found


def _check_resume(run: Resolved) -> Iterator[Violation]:
    """Check that an earlier run of this name, if there is one, can be resumed with these settings and this model."""
    config = run.config
    path, named = Path(config.run.dir) / config.run.name, ("run.name", "run.dir")
    if not has_results(path):
        return
    try:
        RunDir.preview(config)
        saved = num_steps_saved(path)
        if saved and run.model is not None and run.model.has_family:
            from bapo_megatron.checkpoint.folder import read_index  # it needs torch

            with contextlib.suppress(TornCheckpointError):  # a resume skips it
                read_index(path / "checkpoints" / f"step-{saved:06d}" / "learner").check_model(run.shape)
    except ConfigError as error:
        yield Violation(named, str(error))
    except CheckpointError as error:
        yield Violation(("model.path", *named), str(error))
    except UserError as error:  # it is running
        yield warning(named, str(error))


def _check_weights(
    paths: Mapping[str, str | None], folders: Mapping[str, Path | None], run: Resolved, others: Mapping[str, ModelFacts]
) -> Iterator[Violation]:
    """Compare names, shapes and types of the weights in folders with their config.json.

    Args:
        paths: models by setting; those that the package brings or the hub keeps are whole.
        folders: None or absent if they are not on this machine.
        others: what is known of the models besides the policy.
    """
    for setting, path in paths.items():
        folder, facts = folders.get(setting), run.model if setting == "model.path" else others.get(setting)
        if folder is None or facts is None or facts.problems or path in SHIPPED_MODELS or hub.is_hub_name(str(path)):
            continue
        from bapo_megatron.hf.reader import HFReader  # it needs torch

        try:
            with HFReader(folder, headers_only=True) as read:
                is_critic = setting == "critic.path" and VALUE_HEAD.name in read
                read.check_headers(facts.shape.with_value_head() if is_critic else facts.shape)
        except CheckpointError as error:
            yield Violation((setting,), str(error))


def _check_teachers(run: Resolved, folders: Mapping[str, Path | None], policy: Path | None) -> Iterator[Violation]:
    """Check the tokenizer of each teacher in the trainer against the policy's; warn of one that is the policy.

    Args:
        folders: models by setting; None or absent if they are not on this machine.
    """
    for setting, path in run.config.teacher.paths.items():
        if (teacher := folders.get(setting)) is None or policy is None:
            continue
        if teacher.resolve() == policy.resolve():
            yield warning(
                (setting, "model.path"),
                f"{setting}={path!r} is the model that the run starts from: it teaches the policy to stay as it is",
                "set it to a better model with the same tokenizer",
            )
        elif run.model is not None and run.model.has_family:
            yield from check_tokenizers(setting, path, teacher, policy, run.own)


def _check_driver(config: Config) -> Iterator[Violation]:
    """Check that the NVIDIA driver runs the CUDA of torch, which otherwise sees no GPU."""
    import torch

    if (cuda := torch.version.cuda) is None or not (problem := driver_problem(read_driver(), cuda)):
        return
    told = f"{problem}, and torch {torch.__version__} is built for CUDA {cuda}"
    if config.model.dtype == "float32":
        yield warning(("model.dtype",), f"{told}: the run takes place on CPUs", update_driver(cuda))
    else:
        yield Violation(("model.dtype",), told, update_driver(cuda))


def _check_installed(engine: EngineKind, has_gpu: bool) -> Iterator[Violation]:
    """Check that the engine is installed in this environment, with a Megatron-Core that was tried."""
    try:
        if engine.check is not None:
            ENGINE_CHECK.load(engine.check)(has_gpu)
    except UserError as error:
        yield Violation(("rollout.engine",), str(error))
    megatron = check_megatron(has_gpu)
    if megatron.verdict != "ok":
        severity: Severity = "error" if megatron.verdict == "error" else "warning"
        yield Violation(("model.implementation",), f"{megatron.name} {megatron.what}", megatron.advice, severity)


def _check_memory_saver(run: Resolved) -> Iterator[Violation]:
    """Check that servers that take turns with the trainer can release their memory."""
    if run.config.takes_turns and run.engine.section == "sglang":
        found = check_memory_saver()
        if found.verdict == "error":
            yield Violation(("rollout.placement",), f"{found.name} {found.what}", found.advice)


def _check_kernels(engine: EngineKind, model: Path | None) -> Iterator[Violation]:
    """Tell of an SGLang that serves without its compiled kernels here; refuse a model that needs them."""
    if engine.section != "sglang":
        return
    try:
        serving = sglang_kernels.choose()
    except UserError as error:
        yield Violation(("rollout.engine",), str(error))
        return
    if model is not None and (refusal := serving.refusal(model)):
        yield Violation(("model.path", "rollout.engine"), refusal)
    elif not serving.is_usual:
        yield warning(("rollout.engine",), serving.line, sglang_kernels.REMEDY)


def _check_transformer_engine() -> Iterator[Violation]:
    """Check that an installed Transformer Engine works: Megatron-Core imports it for every run."""
    is_there = importlib.util.find_spec("transformer_engine") is not None
    if is_there and (problem := transformer_engine_problem()):
        remedy = f"{REBUILD_ENGINE}, or remove it: {REMOVE_ENGINE}"
        yield Violation(("model.implementation",), f"Transformer Engine cannot be imported: {problem}", remedy)


def _absent(config: Config, is_known: bool) -> Iterator[Violation]:
    """Warn of models and prompts that are not on this machine, and without which the job is not submitted.

    Args:
        is_known: whether the plan uses a known model without its folder; if not, `read_inputs` warns of prompts.
    """
    if not is_known:
        return
    needs = "`bapo slurm` refuses the job until it is there"
    how = f"; {get}" if (get := origin(config.model.path)) else ""
    yield warning(("model.path",), f"model.path={config.model.path} is not on this machine", f"{needs}{how}")
    for table, one in config.prompt_sources.items():
        if one.kind.path == "file" and one.path is not None and not Path(one.path).expanduser().exists():
            yield warning((f"{table}.path",), f"{table}.path={one.path} is not on this machine", needs)


def _with_default(config: Config, table: str, field: str) -> Config:
    """Return the configuration with a setting that cannot be loaded reset to its default."""
    section = getattr(config, table)
    default = type(section).model_fields[field].default
    return config.model_copy(update={table: section.model_copy(update={field: default})})


def accepts_layout(run: Resolved, *, on_gpus: bool) -> bool:
    """Return whether `bapo check` accepts a changed layout of the same number of ranks, apart from memory."""
    violations = check_settings(run, num_gpus=_ENOUGH_GPUS if on_gpus else 0)
    if run.config.cluster.nodes > 1:
        violations += check_placement(run)
    return not any(v.severity == "error" for v in violations)


def _model(path: str, setting: str, found: list[Violation], *, config_only: bool) -> Path | None:
    """Return the folder of the model that `setting` names; add problems with it to `found`."""
    try:
        return resolve_model_path(path, setting=setting, weights=False, config_only=config_only)
    except UserError as error:
        how = origin(path)
        found.append(Violation((setting,), str(error), f"for this one: {how}" if how else ""))
        return None


def _incomplete(path: str) -> Path | None:
    """Return the folder at `path` if it has at least a config.json, which may have problems of its own."""
    folder = Path(path).expanduser()
    return folder if (folder / "config.json").is_file() else None


def _hf_config(folder: Path | None, setting: str, found: list[Violation]) -> dict[str, Any] | None:
    """Return the config.json of the model that `setting` names; add problems with it to `found`."""
    try:
        return None if folder is None else load_hf_config(folder)
    except UserError as error:
        found.append(Violation((setting,), str(error)))
        return None


def num_visible_gpus() -> int:
    """Count this machine's GPUs that torch may use; without a driver, torch is not imported."""
    if not has_gpu_driver():
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
