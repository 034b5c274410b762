"""The plan of a run on a cluster: memory of each kind of GPU, work and time of a step, and whether it fits.

Times are rooflines: "at least" divides by the data sheets' peak rates, "expected" by the share that programs usually
reach (COMPUTE_SHARE, LINK_SHARE). The first is below what updates of one H200 reached without collectives, 0.44 to 0.52
(benchmarks/README.md); the second is assumed. Sampling also pays for the messages between
GPUs.
"""

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bapo_megatron.algorithms.chunks import LARGER_CHUNKS
from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import plural
from bapo_megatron.learner.fit import check_adapters
from bapo_megatron.machine.gpus import FULL, GIB, GPU, GPUS, gpu_memory_gib
from bapo_megatron.machine.memory import (
    TrainerMemory,
    fullest_rank,
    host_bytes,
    layers_per_chunk,
    max_microbatches,
    planned_chunk_rows,
    plans_forwards_first,
    recomputed_layers,
    rows_host_bytes,
    searches_exactly,
    trainer_memory,
)
from bapo_megatron.machine.parameters import Held, active_parameters, model_parameters
from bapo_megatron.machine.server_memory import ServerMemory, server_memory
from bapo_megatron.machine.shared_gpu import CONTEXT_BYTES, SharedGPU, this_share, wanted_server_bytes
from bapo_megatron.preflight import work
from bapo_megatron.preflight.checks.layout import RANKS
from bapo_megatron.preflight.checks.placement import check_sharing
from bapo_megatron.preflight.known_models import planned_config
from bapo_megatron.preflight.reads import reads
from bapo_megatron.preflight.work import decode_seconds
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.resolved.step_tokens import StepTokens, can_share_prompts, saves_by_sharing

COMPUTE_SHARE = 0.4  # share of the peak rate of matrix products
LINK_SHARE = 0.7  # share of the bandwidth of NVLink or PCIe, of the network, and of GPU memory
FOLDER_BYTES_PER_S = 3e9  # assumed: weights written to a folder in memory, and read by a server
HOST_BYTES_PER_S = 20e9  # assumed: between a GPU and pinned memory of its machine, over PCIe, in one direction
NETWORK_BYTES_PER_S = 50e9  # per GPU, between machines, in one direction: 400 Gbit/s
LORA_RANK = 16  # proposed where training all weights does not fit
ROOMY = 0.9  # share of the memory to choose by: a plan is an estimate, and free memory absorbs its errors


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time from the roofline model."""

    least: float
    expected: float


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Needs of a run, for a configuration with `cluster.gpu`."""

    gpu: GPU
    gpu_memory_gib: float
    num_parameters: int  # the model's
    num_active: int  # parameters that one token uses
    trainer: TrainerMemory  # the fullest rank's
    server: ServerMemory | None  # None without SGLang servers
    shared: SharedGPU | None  # None unless trainer and servers share each GPU
    tokens: StepTokens
    flops: float  # per step, over all ranks
    recompute: str  # how much of the layers is recomputed
    chunk_rows: int  # whose logits exist at the same time
    mfu: float  # expected while training, as `perf/mfu` counts it
    unused: tuple[str, ...]  # settings that would make training faster
    host_bytes: int  # copies of a checkpoint, or in turns weights and state, on each node that trains
    rows_bytes: int  # what engines return with each token, in trainer rank 0's CPU memory
    train: Seconds  # per step
    rollout: Seconds | None
    sync: Seconds
    sync_bytes: int

    @property
    def trainer_needs(self) -> int:
        """Bytes of a trainer GPU, with the server on it, if they share it, but without its caches."""
        return self.trainer.total if self.shared is None else self.shared.bytes_without_caches

    @property
    def up_bytes(self) -> int:
        """The bytes that a rank copies to its GPU in each step; 0 without turns."""
        return max((one.moved for one in self._moving), default=0)

    @property
    def down_bytes(self) -> int:
        """The bytes that it copies back to the machine's memory in each step."""
        return max((one.moved - one.frozen for one in self._moving), default=0)

    @property
    def _moving(self) -> tuple[TrainerMemory, ...]:
        """The ranks that may have most to move: the fullest while training, and while weights are pushed."""
        pusher = None if self.shared is None else self.shared.pusher
        return () if pusher is None else (self.trainer, pusher)

    @property
    def moves_s(self) -> float:
        """Seconds of these copies in each step."""
        return (self.down_bytes + self.up_bytes) / HOST_BYTES_PER_S

    @property
    def trainer_fits(self) -> bool:
        return self.trainer_needs <= FULL * self.gpu_memory_gib * GIB

    @property
    def fits(self) -> bool:
        if self.shared is not None:
            return self.shared.fits
        return self.trainer_fits and (self.server is None or self.server.concurrency > 0)


@dataclass(frozen=True, slots=True)
class Balance:
    """An expected step of trainer and servers together. Both wait for the weight sync."""

    mode: str
    step_s: float
    trainer_idle: float  # share of the step
    servers_idle: float


def step_balance(config: Config, plan: RunPlan) -> Balance | None:
    """Combine training and sampling in the mode of `config.rollout`; None without SGLang servers.

    In turns, each side waits for the other; overlapped, the faster side waits for the slower one. On the same GPUs they
    compute in turns, whatever the mode, and wait for the moves of `rollout.placement = "turns"`.
    """
    if plan.rollout is None:
        return None
    r, train_s, rollout_s = config.rollout, plan.train.expected, plan.rollout.expected
    are_together = r.overlap and plan.shared is None
    step_s = (max(train_s, rollout_s) if are_together else train_s + rollout_s) + plan.sync.expected + plan.moves_s
    mode = "overlapped" if r.overlap else "partial" if r.abort_tail else "synchronous"
    return Balance(mode, step_s, 1 - train_s / step_s, 1 - rollout_s / step_s if step_s < math.inf else 0.0)


def make_plan(run: Resolved, response_tokens: int | None = None) -> RunPlan:
    """Plan memory, work and time. response_tokens: average response length; None means the maximum."""
    assert run.config.cluster.gpu is not None
    gpu = GPUS[run.config.cluster.gpu]
    given, run = run, with_choices(run)
    memory_gib = gpu_memory_gib(run.config.cluster)
    assert memory_gib is not None
    tokens = StepTokens.of(run.config, response_tokens, shares_prompts=run.shares_prompts)
    shared = this_share(run)
    trainer = fullest_rank(run, int(memory_gib * GIB)) if shared is None else shared.trainer
    passes = work.num_scoring_passes(run.config, plans_forwards_first(run, int(memory_gib * GIB)))
    flops = work.step_flops(run, tokens, passes)
    server = _server_memory(run) if shared is None else shared.server
    rollout = None
    if server is not None:
        reading, scoring = decode_seconds(run, gpu, server, tokens), work.hint_seconds(run, gpu, tokens)
        messages = work.decode_messages_seconds(run, server, tokens)
        rollout = Seconds(reading + scoring, reading / LINK_SHARE + messages + scoring / COMPUTE_SHARE)
    train = _train_seconds(run, gpu, tokens, trainer.trained, passes + work.teacher_passes(run), flops)
    peak_flops = run.config.parallel.size * gpu.flops(run.config.model.dtype)
    return RunPlan(
        gpu=gpu,
        gpu_memory_gib=memory_gib,
        num_parameters=model_parameters(run.shape),
        num_active=active_parameters(run.shape),
        trainer=trainer,
        server=server,
        shared=shared,
        tokens=tokens,
        flops=flops,
        recompute=_recomputed(run),
        chunk_rows=planned_chunk_rows(run, on_gpu=True),
        mfu=work.model_flops(run, tokens) / (train.expected * peak_flops),
        unused=tuple(_unused(given, tokens, scores=passes > 0)),
        host_bytes=host_bytes(run),
        rows_bytes=rows_host_bytes(run),
        train=train,
        rollout=rollout,
        sync=_sync_seconds(run, gpu),
        sync_bytes=work.sync_bytes(run),
    )


def decided(config: Config) -> Config:
    """Return the configuration that a run keeps: see `with_choices`.

    Raises:
        UserError: there is a cluster to plan for, and the model's config.json is missing or unknown.
    """
    if config.cluster.gpu is None and not config.shares_gpus:
        return config
    return with_choices(planned(config)).config


def planned(config: Config) -> Resolved:
    """Resolve a run whose models need not be on this machine. Raises UserError: see `resolve` and `planned_config`."""
    teachers = {path: planned_config(path, setting) for setting, path in config.teacher.paths.items()}
    return resolve(config, planned_config(config.model.path), teachers)


def with_choices(run: Resolved) -> Resolved:
    """Choose what is left open: the fewest layers to recompute, and then the most rows of logits in a chunk, that leave
    a tenth of the memory free, next to what a server on the same GPU has meanwhile: all its responses in a split.

    Without a cluster to plan for, or a GPU of this machine to share, nothing is chosen.
    """
    shares = run.placement.shares_gpus and run.engine.on_gpus
    if run.config.cluster.gpu is None and not shares:
        return run
    memory_gib = gpu_memory_gib(run.config.cluster)
    if memory_gib is None:
        return run
    gpu_bytes = int(memory_gib * GIB)
    room = int(ROOMY * gpu_bytes) - (wanted_server_bytes(run, memory_gib) if shares else 0)
    return _with_chunks(_with_recompute(run, gpu_bytes, room), gpu_bytes, room)


def _with_recompute(run: Resolved, gpu_bytes: int, room: int) -> Resolved:
    t = run.config.train
    if t.recompute is not None or t.recompute_layers is not None or t.recompute_modules:
        return run
    num_layers = layers_per_chunk(run)

    def recomputing(count: int) -> Resolved:
        layers = count if 0 < count < num_layers else None
        return _training(run, {"recompute": count > 0, "recompute_layers": layers})

    def is_roomy(count: int) -> bool:
        return fullest_rank(recomputing(count), gpu_bytes).total <= room

    return recomputing(bisect.bisect_left(range(num_layers), True, key=is_roomy))


def _with_chunks(run: Resolved, gpu_bytes: int, room: int) -> Resolved:
    """Choose larger chunks than the usual ones if the last stage, which has the logits, has room for them."""
    if run.config.train.logprob_chunk_tokens is not None:
        return run
    usual, last = planned_chunk_rows(run, on_gpu=True), run.config.parallel.pipeline - 1
    larger = (_training(run, {"logprob_chunk_tokens": rows}) for rows in LARGER_CHUNKS if rows > usual)
    memory = ((one, trainer_memory(one, stage=last, gpu_bytes=gpu_bytes).total) for one in larger)
    return next((one for one, total in memory if total <= room), run)


def _training(run: Resolved, settings: dict[str, Any]) -> Resolved:
    return run.changed(run.config.model_copy(update={"train": run.config.train.model_copy(update=settings)}))


def _recomputed(run: Resolved) -> str:
    if modules := run.config.train.recompute_modules if run.config.train.recompute else ():
        return f"{' and '.join(modules)} of every layer"
    return f"{recomputed_layers(run)} of {plural(layers_per_chunk(run), 'layer')} on a rank"


def _unused(run: Resolved, tokens: StepTokens, *, scores: bool) -> Iterator[str]:
    """Yield the settings that would make training faster and are not used (docs/performance.md).

    Args:
        tokens: the step's.
        scores: whether updates have scoring passes.
    """
    p = run.config.parallel
    assert run.config.cluster.gpu is not None
    gpu = GPUS[run.config.cluster.gpu]
    has_fp8 = (
        gpu.fp8_flops is not None and run.shape.experts is None and run.shape.linear is None
    )  # learner/fit.py refuses it
    levers = {
        "train.share_prompts=true": not run.shares_prompts
        and can_share_prompts(run.config.parallel, run.shape)
        and saves_by_sharing(run.config, tokens.response),
        "train.recompute=false": run.config.train.recompute,
        'bapo.scope="lagged"': scores and searches_exactly(run.config),
        'precision.fp8="hybrid"': has_fp8 and not run.config.precision.uses_fp8,
        "parallel.overlap_communication=true": p.data * p.context > 1 and not p.overlap_communication,
        "parallel.virtual_pipeline=2": p.pipeline > 1 and p.virtual_pipeline == 1,
        "sglang.extra.enable_nccl_nvls=true": gpu.has_multicast
        and run.engine.section == "sglang"
        and p.tensor * p.data > 1
        and not run.config.sglang.extra.get("enable_nccl_nvls"),
        "checkpoint.asynchronous=true": run.config.checkpoint.interval_steps and not run.config.checkpoint.asynchronous,
    }
    yield from (setting for setting, is_unused in levers.items() if is_unused)


def check_machines(run: Resolved) -> Iterator[Violation]:
    """Check that one machine can hold a tensor-parallel group and a server; `check_node_gpus` keeps them together."""
    c = run.config.cluster
    if c.gpu is None:
        return
    sizes = {"parallel.tensor": run.config.parallel.tensor}
    if run.engine.on_gpus:
        sizes["rollout.server_tensor_parallel"] = run.config.rollout.server_tensor_parallel
    for setting, size in sizes.items():
        if size > c.gpus_per_node:
            yield Violation(
                (setting, "cluster.gpus_per_node", "cluster.gpu"),
                f"{setting}={size} is more than cluster.gpus_per_node={c.gpus_per_node}: ranks that share layers would "
                "be on two machines, and the network between them is too slow for that",
                f"set it to {c.gpus_per_node} or less",
            )


def check_memory(run: Resolved) -> list[Violation]:
    """Check the memory of the cluster's GPUs against a run whose layout is possible."""
    if run.config.cluster.gpu is None:
        shared = this_share(with_choices(run)) if run.placement.shares_gpus else None
        return [] if shared is None or shared.fits else [_sharing_problem(run, shared)]
    found = memory_problems(run, make_plan(run))
    more = "`bapo plan` shows its parts"
    if run.engine.on_gpus:
        more += ", and with --best finds a split of the GPUs that fits, or the smallest cluster"
    return [replace(v, remedy=f"{v.remedy}; {more}") for v in found]


def check_devices(run: Resolved) -> Iterator[Violation]:
    """Warn of engines that do not use the cluster's GPUs."""
    c, r = run.config.cluster, run.config.rollout
    if c.gpu is not None and run.placement.num_servers and not run.engine.on_gpus:
        yield warning(
            ("rollout.engine", "cluster.gpu"),
            f'rollout.engine="{r.engine}" samples on CPUs, so only the trainer uses the {c.gpu.upper()} GPUs',
            'set rollout.engine="sglang"',
        )


def check_unused(run: Resolved) -> Iterator[Violation]:
    """Warn of a single machine's GPUs that neither trainer nor servers use; `check_node_gpus` does so for several."""
    c, idle = run.config.cluster, _idle_gpus(run)
    if idle > 0:
        yield warning(
            reads(run, _idle_gpus, first=("parallel.data",)),
            f"{idle} of cluster.gpus_per_node={c.gpus_per_node} GPUs {'is' if idle == 1 else 'are'} idle",
            f"raise parallel.data{' or rollout.num_servers' if run.engine.on_gpus else ''}, or set "
            f"cluster.gpus_per_node={c.gpus_per_node - idle}",
        )


def _idle_gpus(run: Resolved) -> int:
    c = run.config.cluster
    return c.gpus_per_node - run.placement.num_gpus if c.gpu is not None and c.nodes == 1 else 0


def memory_problems(run: Resolved, plan: RunPlan) -> list[Violation]:
    """List what exceeds the memory, with numbers; empty if everything fits."""
    found, config, r = [], run.config, run.config.rollout
    if plan.shared is not None:
        return [] if plan.shared.fits else [_sharing_problem(run, plan.shared)]
    need, have = plan.trainer.total / GIB, FULL * plan.gpu_memory_gib
    longest = config.longest_trained
    if need > have:
        remedies = [f"set lora.rank={LORA_RANK} to train adapters alone"] * _fits_with_lora(run)
        remedies += ["split the model over more ranks"]
        remedies += ["set train.recompute=true"] if config.train.recompute is False else []
        remedies += ["set a smaller train.max_tokens_per_microbatch"] * (
            config.train.max_tokens_per_microbatch > longest
        )
        found.append(
            Violation(
                reads(run, _trainer_memory, first=RANKS),
                f"a trainer rank needs {need:.1f} GiB, and {FULL:.0%} of one {plan.gpu.name} is {have:.1f} GiB",
                ", or ".join(remedies),
            )
        )
    if plan.server is not None and plan.server.concurrency == 0:
        found.append(
            Violation(
                reads(run, _server_memory, first=("rollout.server_tensor_parallel",)),
                f"a server of rollout.server_tensor_parallel={plural(r.server_tensor_parallel, 'GPU')} has room for "
                f"{plural(plan.server.kv_tokens, 'token')} besides the weights, and one response takes {longest}",
                "raise rollout.server_tensor_parallel or sglang.extra.mem_fraction_static",
            )
        )
    return found


def _sharing_problem(run: Resolved, shared: SharedGPU) -> Violation:
    """Say what a trainer rank and a server that share a GPU need of it, part by part, and what would fit.

    In turns, it is the phase that needs most.
    """
    t, s, response = shared.trainer, shared.server, run.config.longest_sequence * shared.server.kv_bytes_per_token
    model = t.weights + t.gradients + t.optimizer + t.reference + t.teachers + t.critic + t.fp8
    trainer = {"weights and their state": model, "context": t.context, "a step": t.total - model - t.context}
    server = {"weights": s.weights, "one response": response, "graphs, work and context": shared.rest.total}
    update = t.update if t.update > t.activations + t.working + t.logits else 0
    phases = {"a trainer rank and a server need": (model + update + s.weights, trainer, server)}
    if (p := shared.pusher) is not None:
        released = {"context": CONTEXT_BYTES}
        pushing = {"weights": p.weights, "buckets": p.sync, "context": p.context}
        phases = {
            "training needs": (model + update, trainer, released),
            "pushing weights needs": (p.pushing - p.context + s.weights, pushing, {"weights": s.weights} | released),
            "sampling needs": (s.weights, {"context": p.context}, server),
        }

    def needed(phase: tuple[int, dict[str, int], dict[str, int]]) -> int:
        return sum((*phase[1].values(), *phase[2].values()))

    what, phase = max(phases.items(), key=lambda one: needed(one[1]))
    (of_model, trainer, server), need, have = phase, needed(phase), FULL * shared.gpu_bytes

    def side(name: str, parts: dict[str, int]) -> str:
        listed = ", ".join(f"{what} {num_bytes / GIB:.1f}" for what, num_bytes in parts.items())
        return f"the {name} {sum(parts.values()) / GIB:.1f} ({listed})"

    fitting = math.floor(model_parameters(run.shape) * (have - need + of_model) / of_model / 1e8) / 10
    smaller = f"a model of at most about {fitting:.1f} billion parameters" if fitting > 0 else "a much smaller model"
    return Violation(
        reads(run, lambda run: this_share(with_choices(run)), first=("rollout.placement", *RANKS)),
        f'rollout.placement="{run.config.rollout.placement}": {what} {need / GIB:.1f} GiB of each GPU, and {FULL:.0%} '
        f"of its {shared.gpu_bytes / GIB:.1f} is {have / GIB:.1f}: {side('trainer', trainer)}, "
        f"{side('server', server)}",
        f"{''.join(f'{how}, ' for how in _fitting_changes(run))}use {smaller} with this layout, split the model over "
        "more GPUs (parallel.tensor and rollout.server_tensor_parallel), or set "
        'rollout.placement="separate", which needs more GPUs',
    )


def _fitting_changes(run: Resolved) -> Iterator[str]:
    """Yield the changes after which trainer and server fit their GPU: turns, LoRA, or if need be both."""
    turns, lora = with_turns(run), f"set lora.rank={LORA_RANK} to train adapters alone"
    in_turns = 'set rollout.placement="turns" to give each side the memory while it works'
    fits_in_turns, fits_with_lora = turns is not None and _shares(turns), _fits_with_lora(run)
    if fits_in_turns:
        yield in_turns
    if fits_with_lora:
        yield lora
    if not (fits_in_turns or fits_with_lora) and turns is not None and _fits_with_lora(turns):
        yield f'{lora} and rollout.placement="turns"'


def _shares(run: Resolved) -> bool:
    """Return whether trainer and server fit the GPUs that they share."""
    shared = this_share(with_choices(run))
    return shared is not None and shared.fits


def with_turns(run: Resolved) -> Resolved | None:
    """Return a run whose sides take turns in place of a split; None if they do, or other settings forbid it."""
    if run.config.takes_turns:
        return None
    rollout = run.config.rollout.model_copy(update={"placement": "turns"})
    changed = run.changed(run.config.model_copy(update={"rollout": rollout}))
    return None if any(v.severity == "error" for v in check_sharing(changed)) else changed


def with_lora(run: Resolved) -> Resolved | None:
    """Return a run that trains adapters in place of all weights; None if it trains some, or its model can have none."""
    if run.config.lora.rank is not None:
        return None
    lora = run.config.lora.model_copy(update={"rank": LORA_RANK})
    changed = run.changed(run.config.model_copy(update={"lora": lora}))
    assert changed.model is not None, "plans know the model"
    return None if any(check_adapters(changed.config, changed.model)) else changed


def _fits_with_lora(run: Resolved) -> bool:
    """Return whether trainer and, on a shared GPU, server fit if the run trains adapters in place of all weights."""
    if (changed := with_lora(run)) is None:
        return False
    if run.placement.shares_gpus and run.engine.on_gpus:
        return _shares(changed)
    return _trainer_memory(changed).total <= FULL * (gpu_memory_gib(run.config.cluster) or 0) * GIB


def _trainer_memory(run: Resolved) -> TrainerMemory:
    return fullest_rank(with_choices(run), int((gpu_memory_gib(run.config.cluster) or 0) * GIB))


def _server_memory(run: Resolved) -> ServerMemory | None:
    """Return the memory of a server on GPUs of its own; None on CPUs."""
    memory_gib = gpu_memory_gib(run.config.cluster) if run.engine.on_gpus else None
    return None if memory_gib is None else server_memory(run, memory_gib)


def _train_seconds(run: Resolved, gpu: GPU, tokens: StepTokens, trained: Held, passes: float, flops: float) -> Seconds:
    """Estimate one step's updates and scoring passes."""
    p, t = run.config.parallel, run.config.train
    computing = flops / run.config.parallel.size / gpu.flops(run.config.model.dtype)
    computing *= (
        max(p.stage_sizes(run.shape.num_layers)) * p.pipeline / run.shape.num_layers
    )  # the deepest stage decides
    computing *= work.bubble(run.config, _num_microbatches(run.config, tokens))
    updates = t.minibatches_per_step * t.epochs_per_step
    sharing, stage = p.tensor * p.context, p.tensor * p.context * p.data  # consecutive ranks
    sending = work.tensor_parallel_bytes(run, tokens, passes) / gpu.link_bytes_per_s
    sending += work.context_parallel_bytes(run, tokens, passes) / _link(run.placement, gpu, sharing)
    sending += work.expert_parallel_bytes(run, tokens, passes) / _link(run.placement, gpu, max(p.expert, p.tensor))
    sending += work.pipeline_parallel_bytes(run, tokens, passes) / _link(run.placement, gpu, run.config.parallel.size)
    sending += updates * work.gradient_bytes(run.config, trained) / _link(run.placement, gpu, stage)
    return Seconds(computing + sending, computing / COMPUTE_SHARE + sending / LINK_SHARE)


def _link(placement: Placement, gpu: GPU, num_consecutive: int) -> float:
    """Return the bytes per second between ranks of a group that spans `num_consecutive` ranks."""
    return NETWORK_BYTES_PER_S if work.spans_nodes(placement, num_consecutive) else gpu.link_bytes_per_s


def _num_microbatches(config: Config, tokens: StepTokens) -> int:
    """Count the micro-batches of one update on one data rank, for responses of this length."""
    per_rank = tokens.total / config.train.minibatches_per_step / config.parallel.data
    budget = config.train.max_tokens_per_microbatch * config.parallel.context
    return min(max(1, math.ceil(per_rank / max(budget, tokens.per_sequence))), max_microbatches(config))


def _sync_seconds(run: Resolved, gpu: GPU) -> Seconds:
    """Estimate gathering from tensor ranks and later stages to rank 0, then the broadcast from there, or the files."""
    p, num_bytes = run.config.parallel, work.sync_bytes(run)
    gathering = num_bytes * (p.tensor - 1) / p.tensor / gpu.link_bytes_per_s
    if p.pipeline > 1:
        gathering += num_bytes * (p.pipeline - 1) / p.pipeline / _link(run.placement, gpu, run.config.parallel.size)
    link = NETWORK_BYTES_PER_S if run.placement.num_nodes > 1 else gpu.link_bytes_per_s
    sending = num_bytes / (FOLDER_BYTES_PER_S if run.config.sync_channel == "disk" else link)
    return Seconds(gathering + sending, (gathering + sending) / LINK_SHARE)
