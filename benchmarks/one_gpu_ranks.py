"""Several trainer ranks and servers on ONE GPU, over NCCL, against one process: correctness only, nothing is timed.

    export NCCL_MULTI_RANK_GPU_ENABLE=1
    python benchmarks/one_gpu_ranks.py --part c1 --backend nccl --nccl libnccl.so.2 --output c1.json
    python benchmarks/one_gpu_ranks.py --part c1 --backend gloo --engine embedded --output c1.json     the same on CPUs

    c1   TP2; DP2 with the distributed optimizer; a weight push to one server: over NCCL if it is SGLang's
    c2   PP2; CP2; EP2; TP2 x PP2
    c3   a push to two servers; a rank killed and restarted; a broadcast that one server never joins

--nccl is a library of NCCL 2.30.7 or newer, which is preloaded in every process; without it LD_PRELOAD or torch's own
must be new enough, or one line says so and nothing starts (exit code 2). --backend gloo hides all GPUs.

A layout is compared with one process in float32, on the same device: losses, each parameter's gradient by Hugging Face
name, and bounds of three updates. In bfloat16, rounding alone would be 4e-3, and would hide an error below that. A push
is compared in the type of real runs: bfloat16 on a GPU, float32 on CPUs. The bytes of a push are compared by checksum.

Each result is one line of JSON, printed and written to --output as soon as it is there: "ok", what was found, and its
tolerance. A result that fails does not end the next ones. Exit code: 0; 1 if one is not ok. Every process has a
deadline, and is killed with its process group.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from bapo_megatron.engines.processes import has_ended, kill, loopback_variables, reserved_ports  # noqa: E402
from bapo_megatron.errors import UserError  # noqa: E402
from bapo_megatron.resolved import resolve  # noqa: E402
from bapo_megatron.resolved.placement import Placement  # noqa: E402
from bapo_megatron.runtime import LOOPBACK, nccl  # noqa: E402
from bapo_megatron.runtime.environment import trainer_variables  # noqa: E402
from bapo_megatron.runtime.files import read_jsonl  # noqa: E402
from bapo_megatron.trainer import leave  # noqa: E402

Row = dict[str, Any]

LAYOUTS: dict[str, tuple[str, dict[str, int], bool]] = {  # title -> model, [parallel], distributed optimizer
    "TP2": ("qwen3", {"tensor": 2}, False),
    "DP2, distributed optimizer": ("qwen3", {"data": 2}, True),
    "PP2": ("qwen3", {"pipeline": 2}, False),
    "CP2": ("qwen3", {"context": 2}, False),
    "EP2": ("qwen3_moe", {"data": 2, "expert": 2}, False),
    "TP2 x PP2": ("qwen3", {"tensor": 2, "pipeline": 2}, False),
}
PUSH, PUSH_TO_TWO, RESTART = "a push to one server", "a push to two servers", "a rank killed and restarted"
NEVER_JOINED, NEVER_MET = "a broadcast that one server never joins", "a first broadcast that one server never joins"
SINGLE = "one process, "
PARTS = {
    "c1": ("TP2", "DP2, distributed optimizer", PUSH),
    "c2": ("PP2", "CP2", "EP2", "TP2 x PP2"),
    "c3": (PUSH_TO_TWO, NEVER_JOINED, RESTART, NEVER_MET),
}
RHO0 = {"qwen3": 0.3, "qwen3_moe": 0.25}  # targets of the search for bounds, as in tests/integration/layouts.py
# Relative. A missing token, or one tensor in bfloat16, is above 1e-3; over gloo, rounding is at most 3e-6.
LAYOUT_TOLERANCE = {"loss": 1e-5, "gradient": 1e-4, "norm": 1e-4}
# Mean |trainer - server| over sampled tokens, in nats.
PUSH_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02}
NUM_VERSIONS, NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 4, 6, 24
NUM_STEPS, LAST_BEFORE_DEATH = 4, 2  # in the run whose rank is killed
KEY = "a-key-of-this-script"
RUN_VARIABLE = "ONE_GPU_RANKS_RUN"  # the folder of that run
# SGLang next to a trainer and another server: a small cache, and a short start.
ON_GPU = {
    "mem_fraction_static": 0.15,
    "max_total_tokens": 8192,
    "disable_cuda_graph": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}


# In the parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--nccl", type=Path, metavar="LIBRARY", help="libnccl.so.2 to preload")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="file for the lines")
    parser.add_argument("--only", nargs="*", metavar="RESULT", help="only these results of the part")
    parser.add_argument("--deadline-s", type=float, default=240.0, help="of each result")
    parser.add_argument("--sync-timeout-s", type=float, default=15.0, help="sync.timeout_s, which ends a broken push")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the engine, such as sglang.extra")
    options = parser.parse_intermixed_args()
    if options.job:
        run_job(options)
        leave(0)  # a thread may be stuck in a broadcast
    if options.part is None:
        parser.error("--part is missing")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the children
    try:
        set_environment(options)
    except UserError as error:
        print(f"bapo: {error}", file=sys.stderr)
        return 2
    if options.output:
        options.output.write_text("")
    wanted = [title for title in PARTS[options.part] if options.only is None or title in options.only]
    with tempfile.TemporaryDirectory(prefix="one-gpu-ranks-") as folder:
        results = [report(options, title, Path(folder)) for title in ("imports", *wanted)]
    return 0 if all(results) else 1


def set_environment(options: argparse.Namespace) -> None:
    """Set the variables of all processes. Raises UserError: several ranks cannot run here with this backend.

    The script starts itself again if a library is to be preloaded, because the linker reads that once.
    """
    if options.backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif options.nccl:
        if not options.nccl.is_file():
            raise UserError(f"--nccl {options.nccl}: there is no such file")
        loaded = str(options.nccl.resolve())
        if loaded not in os.environ.get("LD_PRELOAD", "").split(os.pathsep):
            os.environ["LD_PRELOAD"] = os.pathsep.join(filter(None, [loaded, os.environ.get("LD_PRELOAD")]))
            os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ |= trainer_variables({}) | loopback_variables() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("NCCL_MAX_CTAS", "1")  # ranks on one GPU must run at the same time
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if options.backend == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--backend nccl needs a GPU, and torch sees none: set --backend gloo")
        if problem := nccl.sharing_problem():
            raise UserError(f"several ranks cannot use one GPU ({problem}): {nccl.sharing_remedy()}")


def report(options: argparse.Namespace, title: str, folder: Path) -> bool:
    """Find one result, print its line and append it to the file. Return whether it is ok."""
    where = {"part": options.part, "result": title, "backend": options.backend}
    try:
        found = RESULTS[title](options, title, folder)
    except Exception as error:  # any library may raise it, and the next result may still be right
        if not isinstance(error, UserError | TimeoutError | RuntimeError):
            traceback.print_exc()
        found = {"ok": False, "failed": f"{type(error).__name__}: {error}"}
    line = json.dumps(where | found)
    print(line, flush=True)
    if options.output:
        with options.output.open("a") as lines:
            lines.write(line + "\n")
    return bool(found["ok"])


def imports(options: argparse.Namespace, title: str, folder: Path) -> Row:
    """Import what the results need, so that a missing package is the first line and not the last."""
    import megatron.core
    import torch

    import tests.integration.layouts  # noqa: F401

    if options.part != "c2" and options.engine == "sglang":
        ask([sys.executable, "-c", "import bapo_megatron.engines.sglang_server"], options.deadline_s)
    torch_nccl = nccl.loaded_version()
    return {
        "ok": True,
        "torch": torch.__version__,
        "megatron_core": megatron.core.__version__,
        "nccl": torch_nccl and ".".join(map(str, torch_nccl)),
    }


def ask(command: Sequence[str], deadline_s: float) -> str:
    """Return a command's output. Raises RuntimeError with its last line, or TimeoutError."""
    return together([command], [{}], deadline_s)[0]


def together(commands: Sequence[Sequence[str]], own: Sequence[dict[str, str]], deadline_s: float) -> list[str]:
    """Run commands at the same time, each in a process group with its own variables, and return their outputs.

    Raises:
        RuntimeError: one ended with another exit code than 0; says which, with the end of its output.
        TimeoutError: one was still running at the deadline.
    """
    deadline = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in commands]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for command, variables, log in zip(commands, own, logs, strict=True):
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        env=os.environ | variables,
                        start_new_session=True,
                    )
                )
            while running := [process for process in started if not has_ended(process)]:
                ended = [process for process in started if process not in running]
                if any(process.wait() for process in ended) or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            late = [not has_ended(process) for process in started]
            for process in started:
                kill(process)
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
        for index, process in enumerate(started):
            if not late[index] and process.returncode:
                end = " | ".join(texts[index].strip().splitlines()[-3:])
                raise RuntimeError(f"process {index} ended with exit code {process.returncode}: {end[-1500:]}")
        if any(late):
            stuck = [index for index, is_late in enumerate(late) if is_late]
            ends = " | ".join(texts[stuck[0]].strip().splitlines()[-2:])
            raise TimeoutError(f"processes {stuck} were still running after {deadline_s:g} s: {ends[-1500:]}")
        return texts


def run_ranks(options: argparse.Namespace, job: str, folder: Path, count: int) -> None:
    """Run a job of this script on `count` trainer ranks."""
    command = [sys.executable, __file__, "--job", job, "--folder", str(folder), "--engine", options.engine]
    command += ["--sync-timeout-s", str(options.sync_timeout_s), "--deadline-s", str(options.deadline_s)]
    with reserved_ports(1) as (port,):
        common = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        together([[*command, *options.settings]] * count, own, options.deadline_s)


def layout(options: argparse.Namespace, title: str, folder: Path) -> Row:
    """Compare a layout with one process, which runs once for each model."""
    import torch

    from tests.integration.layouts import compare
    from tests.integration.learner_reference import save_random_model

    model, parallel, _ = LAYOUTS[title]
    if not (folder / model).exists():
        save_random_model(model, folder / model)
    single = SINGLE + model
    for job in (single, title):
        if not (folder / f"{job}.pt").exists():
            run_ranks(options, job, folder, num_ranks(parallel) if job == title else 1)
    got, want = (torch.load(folder / f"{job}.pt", weights_only=True) for job in (title, single))
    difference = compare(got, want)
    found = {"loss": difference.loss, "gradient": difference.gradient, "norm": difference.norm}
    is_within = all(found[name] <= limit for name, limit in LAYOUT_TOLERANCE.items())
    return {
        "ok": is_within and difference.same_bounds,
        "ranks": num_ranks(parallel),
        **json.loads((folder / f"{title}.facts.json").read_text()),
        "dtype": "float32",
        **{name: float(f"{value:.2g}") for name, value in found.items()},
        "num_gradients": len(got["gradients"][0]),
        "same_bounds": difference.same_bounds,
        "bounds": [list(of_rank_0[0][:2]) for of_rank_0 in want["bounds"]],
        "tolerance": LAYOUT_TOLERANCE,
    }


def num_ranks(parallel: dict[str, int]) -> int:
    """Return the number of ranks of a layout; experts are split over data ranks."""
    product = 1
    for name in ("tensor", "pipeline", "context", "data"):
        product *= parallel.get(name, 1)
    return product


def push(options: argparse.Namespace, title: str, folder: Path) -> Row:
    """Push, sample and score in a rank of its own."""
    own = folder / title.replace(" ", "-")
    own.mkdir()
    try:
        run_ranks(options, title, own, 1)
    except (RuntimeError, TimeoutError) as error:
        logs = [f"{log.name}: {log.read_text(errors='replace').strip()[-600:]}" for log in own.glob("engine-*.log")]
        raise type(error)(" | ".join([str(error), *logs])) from error
    return json.loads((own / "row.json").read_text())


def restart(options: argparse.Namespace, title: str, folder: Path) -> Row:
    """Run `bapo train` with two ranks, of which one kills itself after LAST_BEFORE_DEATH steps."""
    from tests.hang import PATIENT

    run = folder / "killed"
    settings = [
        *(f"run.dir={folder}", f"run.name={run.name}", "run.max_restarts=1", f"train.num_steps={NUM_STEPS}"),
        *("parallel.tensor=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4"),
        *("rollout.groups_in_flight=6", "checkpoint.interval_steps=1", "monitor.progress=lines", *PATIENT),
        *("loss.name=benchmarks.one_gpu_ranks:dying_loss", *engine_settings(options)),
    ]
    command = [sys.executable, "-m", "bapo_megatron", "train", "demo", *settings]
    (text,) = together([command], [{RUN_VARIABLE: str(run)}], options.deadline_s)
    rows = read_jsonl(run / "metrics.jsonl")
    found = {
        "steps": [row["step"] for row in rows],
        "restarts": [row["run/restarts"] for row in rows],
        "was_killed": (run / "killed").exists(),
        "told": "ended with exit code -9" in text and "restart 1 of 1" in text,
    }
    wanted = {
        "steps": [*range(1, NUM_STEPS + 1)],
        "restarts": [0] * LAST_BEFORE_DEATH + [1] * (NUM_STEPS - LAST_BEFORE_DEATH),
        "was_killed": True,
        "told": True,
    }
    return {"ok": found == wanted, **found, "tolerance": wanted}


RESULTS: dict[str, Callable[[argparse.Namespace, str, Path], Row]] = {
    "imports": imports,
    **dict.fromkeys(LAYOUTS, layout),
    **dict.fromkeys((PUSH, PUSH_TO_TWO, NEVER_JOINED, NEVER_MET), push),
    RESTART: restart,
}


# In the ranks


def dying_loss(inputs: Any) -> Any:
    """Compute the policy gradient; rank 1 first kills itself, once, in the step after LAST_BEFORE_DEATH."""
    run = Path(os.environ.get(RUN_VARIABLE, os.devnull))
    latest, mark = run / "checkpoints" / "latest", run / "killed"
    is_time = latest.exists() and latest.read_text() == f"step-{LAST_BEFORE_DEATH:06d}"
    if is_time and os.environ.get("RANK") == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return inputs.plain((-inputs.batch.advantages_R * inputs.log_probs_R).where(inputs.batch.mask_R, 0.0))


def run_job(options: argparse.Namespace) -> None:
    """Run one rank of a job."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    if options.job in (PUSH, PUSH_TO_TWO, NEVER_JOINED, NEVER_MET):
        exchange(options)
    else:
        update(options.job, options.folder)


def update(job: str, folder: Path) -> None:
    """Save what the updates of a layout give, and where its ranks ran."""
    import torch
    import torch.distributed as dist

    from bapo_megatron.runtime.ranks import gather_json
    from tests.integration.layouts import Layout, updates
    from tests.integration.learner_reference import random_batch

    model, parallel, distributed = LAYOUTS.get(job) or (job.removeprefix(SINGLE), {}, False)
    config = Layout(job, dict(parallel), distributed).config(RHO0[model])
    settings = config.model_dump(exclude_unset=True) | {"model": {"dtype": "float32", "implementation": "local"}}
    result = updates(type(config).model_validate(settings), folder / model, random_batch())
    place = f"{torch.cuda.current_device()}: {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU"
    places = gather_json(place)
    if dist.get_rank() == 0:
        torch.save(result, folder / f"{job}.pt")
        facts = {"groups": dist.get_backend_config(), "devices": sorted(set(places))}
        (folder / f"{job}.facts.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def engine_settings(options: argparse.Namespace) -> list[str]:
    """Return the settings of engine and model type, for this machine."""
    import torch

    on_gpu = torch.cuda.is_available()
    extra = [f"sglang.extra.{name}={json.dumps(value)}" for name, value in ON_GPU.items()] if on_gpu else []
    return [
        f"rollout.engine={options.engine}",
        f"model.dtype={'bfloat16' if on_gpu else 'float32'}",
        *(extra if options.engine == "sglang" else []),
        *options.settings,
    ]


class Exchange:
    """One rank, its servers, and a channel to them: push, sample from each server, score the samples, update."""

    def __init__(self, options: argparse.Namespace, urls: list[str], learner: Any, config: Any) -> None:
        from bapo_megatron.engines.connected import ConnectedEngines
        from bapo_megatron.sync.base import RankZeroChannel
        from bapo_megatron.sync.broadcast import BroadcastChannel

        self.learner, self.deadline_s = learner, options.deadline_s
        self.engines = ConnectedEngines.connect(
            config.rollout, resolve(config).engine, urls, learner.shape.vocab_size, KEY
        )
        self.engines.watch(with_states=False)
        self.sender = BroadcastChannel(self.engines.pool, config.sync, self.engines.loop.submit)
        self.channel = RankZeroChannel(self.sender)
        self.channel.connect(learner.weights())

    def close(self) -> None:
        self.channel.close()
        self.engines.close()

    def live(self) -> list[int]:
        """Return the indices of the servers that sample."""
        pool = self.engines.pool
        return [index for index, engine in enumerate(pool.engines) if pool.is_live(engine)]

    def push_to_all(self) -> None:
        """Push until every server has this version; those that were fenced come back first."""
        deadline, pool = time.monotonic() + self.deadline_s, self.engines.pool
        while len(self.live()) < len(pool.engines):
            while len(self.live()) + len(pool.back()) < len(pool.engines):
                assert time.monotonic() < deadline, f"not back: {pool.describe()}"
                time.sleep(0.1)
            self.channel.push(self.learner.weights())

    def compare(self) -> Row:
        """Sample from each live server, and score the samples with the trainer's weights, before and after an update.

        Returns the versions that the servers name, their checksums, and mean |log-prob differences| in nats.
        """
        import torch

        from bapo_megatron.buffer.packing import one_minibatch
        from bapo_megatron.engines.base import GenerateRequest
        from bapo_megatron.engines.wire import DIGEST, digest
        from bapo_megatron.errors import EngineError
        from bapo_megatron.types import Batch, ClipBounds

        learner, loop, generator = self.learner, self.engines.loop, torch.Generator().manual_seed(self.learner.version)
        ids, behaviour, versions, checksums = [], [], set(), []
        mine = {name: digest(tensor) for name, tensor in learner.weights().whole()}
        for number, engine in enumerate(live := self.engines.pool.live()):
            size = (NUM_PROMPTS, PROMPT_TOKENS)
            prompts = torch.randint(5, learner.shape.vocab_size - 1, size, generator=generator).tolist()
            requests = [
                GenerateRequest(f"{learner.version}-{number}-{i}", tuple(prompt), NEW_TOKENS, 1.0, (), seed=i)
                for i, prompt in enumerate(prompts)
            ]
            for prompt, reply in zip(prompts, loop.run(engine.generate_many(requests), self.deadline_s), strict=True):
                if isinstance(reply, EngineError):
                    raise reply
                ids.append(torch.tensor([*prompt, *reply.token_ids]))
                behaviour.append(torch.tensor([0.0] * len(prompt) + list(reply.behaviour_logprobs)))
                versions |= {span.version for span in reply.spans}
            held = loop.run(engine.transport.digests(), self.deadline_s)
            if held.get("algorithm") == DIGEST:
                checksums.append("the trainer's" if held["ranks"][0]["checksums"] == mine else "other")
            else:
                checksums.append(str(held["per_engine_checksum"])[:16])
        lens_S = torch.tensor([len(tokens) for tokens in ids])
        is_sampled_T = torch.cat([torch.arange(len(tokens)) >= PROMPT_TOKENS for tokens in ids])
        sign_T = torch.repeat_interleave(torch.tensor([1.0, -0.5]).repeat(len(ids))[: len(ids)], lens_S)
        batch = Batch(
            token_ids_T=torch.cat(ids),
            seq_lens_S=lens_S,
            sampled_T=is_sampled_T,
            advantages_T=sign_T * is_sampled_T,
            behaviour_logprobs_T=torch.cat(behaviour),
            versions_T=torch.where(is_sampled_T, learner.version, -1),
            mask_T=is_sampled_T,
        )
        minibatch = one_minibatch(batch, max_tokens=int(lens_S.sum()), share=learner.share)

        def scores_R() -> Any:
            return learner.log_probs(minibatch)[0].float().cpu()

        before_R, engine_R = scores_R(), batch.behaviour_logprobs_T[minibatch.micro_batches[0].batch_rows_R.cpu()]
        pushed = learner.version
        learner.step(minibatch, ClipBounds(low=0.5, high=2.0, positive_share=0.5, saturated=False, num_moves=0))
        difference_R = (before_R - engine_R).abs()
        return {
            "pushed": pushed,
            "servers": len(live),
            "sampled_with": sorted(versions),
            "checksums": checksums,
            "tokens": int(is_sampled_T.sum()),
            "mean": float(f"{difference_R.mean():.2g}"),
            "largest": float(f"{difference_R.max():.2g}"),
            "an_update_moves": float(f"{(scores_R() - before_R).abs().mean():.2g}"),
        }


def exchange(options: argparse.Namespace) -> None:
    """Write the row of one push result."""
    from bapo_megatron.assets import demo_model_path
    from bapo_megatron.config.load import load_config
    from bapo_megatron.engines.start import running_engines
    from bapo_megatron.learner.megatron import MegatronLearner

    num_servers = 1 if options.job == PUSH else 2
    settings = [
        *(f"data.max_prompt_tokens={PROMPT_TOKENS}", f"rollout.max_response_tokens={NEW_TOKENS}"),
        *(f"rollout.num_servers={num_servers}", f"rollout.hang_timeout_s={2 * options.sync_timeout_s}"),
        *(f"rollout.startup_timeout_s={options.deadline_s}", "rollout.max_restarts=2"),
        *(f"sync.timeout_s={options.sync_timeout_s}", "sync.bucket_mib=1", "optimizer.lr=1e-3"),
        *engine_settings(options),
    ]
    config, model = load_config([], settings), demo_model_path()
    learner = MegatronLearner(resolve(config, model))
    share = Placement(num_servers=num_servers, num_ranks=1).on()
    with running_engines(resolve(config, model), options.folder, share, KEY) as urls:
        pair = Exchange(options, urls, learner, config)
        if options.job in (NEVER_JOINED, NEVER_MET):
            row = break_a_push(pair, config.model.dtype, is_first=options.job == NEVER_MET)
        else:
            found = []
            for _ in range(NUM_VERSIONS):
                assert pair.channel.push(learner.weights()).is_whole
                found.append(pair.compare())
            row = judged(found, num_servers, config.model.dtype)
        assert pair.sender.group is not None
        row |= {"engine": options.engine, "group": pair.sender.group.backend, "dtype": config.model.dtype}
        (options.folder / "row.json").write_text(json.dumps(row))
        pair.close()


def judged(found: list[Row], num_servers: int, dtype: str) -> Row:
    """Judge what `compare` found after each push."""
    limit = PUSH_TOLERANCE[dtype]
    of_versions = [set(row["checksums"]) for row in found]
    is_embedded = "the trainer's" in of_versions[0]
    ok = all(
        row["servers"] == num_servers
        and row["sampled_with"] == [row["pushed"]]
        and row["mean"] <= limit
        and row["an_update_moves"] > 10 * limit  # otherwise, old weights would pass
        and len(row["checksums"]) == num_servers
        and checksums == ({"the trainer's"} if is_embedded else {row["checksums"][0]})
        for row, checksums in zip(found, of_versions, strict=True)
    )
    if not is_embedded:  # SGLang's own checksums: other weights, other sums
        ok = ok and len(set.union(*of_versions)) == len(found)
    return {"ok": ok, "pushes": found, "tolerance": {"mean": limit, "an_update_moves": f"> {10 * limit:g}"}}


def break_a_push(pair: Exchange, dtype: str, *, is_first: bool) -> Row:
    """Push while the second server is never told of a bucket, so that it never joins the broadcast; then push again.

    Over NCCL the first broadcast of a group also makes its communicator, which nothing can abort; later ones can be.
    """
    import asyncio

    found = []
    if not is_first:
        assert pair.channel.push(pair.learner.weights()).is_whole
        found.append(pair.compare())
    silent = pair.engines.pool.engines[1]
    take = silent.transport.take

    async def never(*_: Any, **__: Any) -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    silent.transport.take = never  # type: ignore[method-assign]
    pair.channel.push(pair.learner.weights())
    silent.transport.take = take  # type: ignore[method-assign]
    right_after, why = pair.live(), pair.engines.pool.describe()
    pair.push_to_all()
    found.append(pair.compare())
    row = judged(found, 2, dtype)
    return row | {
        "ok": row["ok"] and 1 not in right_after and silent.url in why,  # it may be "back" already
        "fenced": why,
        "received_without_it": right_after,  # over NCCL a server that has entered may be stuck, and is then restarted
    }


if __name__ == "__main__":
    sys.exit(main())
