"""Checks of trainer ranks, GPUs, and the batch that is divided among them."""

import math
from collections.abc import Iterator
from urllib.parse import urlsplit

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import plural
from bapo_megatron.resolved import Resolved
from bapo_megatron.runtime.nccl import may_share_gpus, sharing_problem, sharing_remedy

RANKS = ("parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.data")
"""Settings whose product is the number of trainer ranks."""


def check_layout(config: Config) -> Iterator[Violation]:
    """Check the sizes of the split against each other."""
    p, product = config.parallel, config.parallel.size
    if p.num_ranks is not None and p.num_ranks != product:
        data, rest = divmod(p.num_ranks, product // p.data)
        advice = ", or leave it out" if rest else f" or parallel.data={data}"
        yield Violation(
            ("parallel.num_ranks", *RANKS),
            f"parallel.num_ranks={p.num_ranks}, but tensor x pipeline x context x data = {p.tensor} x {p.pipeline} x "
            f"{p.context} x {p.data} = {product}",
            f"set parallel.num_ranks={product}{advice}",
        )
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        yield Violation(
            ("parallel.virtual_pipeline", "parallel.pipeline"),
            f"parallel.virtual_pipeline={p.virtual_pipeline} splits pipeline stages into chunks and needs "
            "parallel.pipeline above 1",
            "set parallel.virtual_pipeline=1",
        )
    if config.train.schedule == "forwards_first" and p.pipeline > 1:
        yield Violation(
            ("train.schedule", "parallel.pipeline"),
            f'train.schedule="forwards_first" is not possible with parallel.pipeline={p.pipeline}, whose stages have '
            "their own order of micro-batches",
            'set train.schedule="auto"',
        )
    if config.optimizer.distributed and p.data * p.context == 1 and config.cluster.gpu is None:
        yield warning(
            ("optimizer.distributed", "parallel.data", "parallel.context", "cluster.gpu"),
            "optimizer.distributed=true splits Adam's state over parallel.data x context ranks, and there is only one",
            "set optimizer.distributed=false",
        )
    if p.sequence and p.tensor == 1:
        yield Violation(
            ("parallel.sequence", "parallel.tensor"),
            "parallel.sequence=true splits within the tensor-parallel group and needs parallel.tensor above 1",
            "set parallel.sequence=false",
        )


def check_gpu_count(run: Resolved, num_gpus: int, *, starts_here: bool = False) -> Iterator[Violation]:
    """Check the number of GPUs: each rank and server needs its own, unless NCCL lets them share (runtime/nccl.py).

    With `rollout.placement = "split"`, each rank has a GPU, and each server has its own: the plan knows one of each.

    Args:
        num_gpus: GPUs that the run may use; 0 means a run on CPUs.
        starts_here: whether they are this machine's, whose processes may share them.
    """
    c, r, placement = run.config.cluster, run.config.rollout, run.placement
    ranks, on_servers, needed = placement.num_ranks, placement.num_server_gpus, placement.num_gpus
    if c.nodes > 1:  # checks/slurm.py looks at each node
        return
    if not num_gpus or needed <= num_gpus:
        if starts_here and num_gpus:
            yield from _check_attached(run, num_gpus)
        return
    may_share = may_share_gpus() and not placement.shares_gpus
    if starts_here and may_share and (not on_servers or r.server_tensor_parallel <= num_gpus):
        if problem := sharing_problem():
            yield Violation(
                (*RANKS, "rollout.num_servers"),
                f"{needed} processes cannot share {plural(num_gpus, 'GPU')}: {problem}",
                sharing_remedy(),
            )
        return
    each = plural(r.server_tensor_parallel, "GPU")
    if placement.shares_gpus and ranks > num_gpus:
        on_servers = 0  # the ranks alone are too many
    servers = f" and {plural(r.num_servers, run.engine.title)} x {each}" if on_servers else ""
    lower = f"lower parallel.*{', rollout.num_servers or rollout.server_tensor_parallel' if on_servers else ''}"
    there = f"{num_gpus} {'is' if num_gpus == 1 else 'are'} visible"
    remedy = f'{lower}, or set CUDA_VISIBLE_DEVICES="" to run on CPUs'
    if c.gpu is not None and num_gpus == c.gpus_per_node:
        there = f"cluster.nodes x gpus_per_node = 1 x {num_gpus} = {num_gpus}"
        remedy = fitting(run)
        if "cluster.nodes=" in remedy:
            remedy += "; `bapo slurm` submits a run on several nodes"
    yield Violation(
        (*RANKS, "rollout.engine", "rollout.num_servers", "rollout.server_tensor_parallel", "cluster"),
        f"{plural(ranks, 'trainer rank')}{servers} {'needs' if needed == 1 else 'need'} {plural(needed, 'GPU')}, and "
        f"{there}",
        remedy,
    )


def fitting(run: Resolved) -> str:
    """Advise the nearest value of each setting that alone makes room for every rank and server, or say what could."""
    c, r, placement = run.config.cluster, run.config.rollout, run.placement
    alone = run.config.slurm.rollout_nodes or placement.engine_nodes
    most = placement.num_ranks + placement.num_servers
    tried = (
        ("cluster", "nodes", c.nodes, range(1, most + 1)),
        ("slurm", "rollout_nodes", alone, range(c.nodes)),
        ("rollout", "num_servers", r.num_servers, range(1, 2 * max(r.num_servers, c.nodes) + 1)),
    )
    found = []
    for table, name, now, values in tried:
        for value in sorted(values, key=lambda value: abs(value - now)):
            section = getattr(run.config, table).model_copy(update={name: value})
            if value != now and _is_placed(run.changed(run.config.model_copy(update={table: section}))):
                found.append(f"{table}.{name}={value}")
                break
    words = "change parallel.*, rollout.num_servers, rollout.server_tensor_parallel or cluster.nodes"
    return f"set {' or '.join(found)}, or {words}" if found else words


def _is_placed(run: Resolved) -> bool:
    """Return whether ranks and servers spread evenly over the nodes, with GPUs for all."""
    placement, cluster, alone = run.placement, run.config.cluster, run.config.slurm.rollout_nodes
    if (alone or 0) >= cluster.nodes or (alone and not placement.num_servers) or not placement.is_even:
        return False
    if placement.ranks_per_node % run.config.parallel.tensor and cluster.gpu is not None:
        return False
    return cluster.gpu is None or placement.gpus_per_node <= cluster.gpus_per_node


def _check_attached(run: Resolved, num_gpus: int) -> Iterator[Violation]:
    """Warn of more ranks and servers on this machine than GPUs: two of them may be on one, which NCCL refuses."""
    r, num_ranks = run.config.rollout, run.placement.num_ranks
    is_sent = run.config.sync_channel == "broadcast" and run.engine.needs == "urls"
    num_here = sum(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in r.urls) if is_sent else 0
    if num_ranks + num_here > num_gpus and num_here and (problem := sharing_problem()):
        yield warning(
            ("sync.channel", "rollout.urls", *RANKS),
            f"{plural(num_ranks, 'trainer rank')} and {plural(num_here, 'server')} at rollout.urls use "
            f"{plural(num_gpus, 'GPU')}: if one serves on a trainer's GPU, its weights cannot go over NCCL ({problem})",
            f'set sync.channel="disk", or {sharing_remedy()}',
        )


def check_batch(config: Config) -> Iterator[Violation]:
    """Check how a batch is divided into mini-batches and over data ranks, and how old its samples get."""
    r, t, data = config.rollout, config.train, config.parallel.data
    num_sequences = r.prompts_per_step * r.samples_per_prompt
    sequences = ("train.minibatches_per_step", "rollout.prompts_per_step", "rollout.samples_per_prompt")
    if num_sequences % t.minibatches_per_step:
        nearest = nearest_divisor(num_sequences, t.minibatches_per_step)
        yield Violation(
            sequences,
            f"train.minibatches_per_step={t.minibatches_per_step} does not divide rollout.prompts_per_step x "
            f"samples_per_prompt = {r.prompts_per_step} x {r.samples_per_prompt} = {plural(num_sequences, 'sequence')}",
            f"set train.minibatches_per_step={nearest}",
        )
    elif (each := num_sequences // t.minibatches_per_step) < data:
        at_most = num_sequences // data
        advice = (
            f"set train.minibatches_per_step={nearest_divisor(num_sequences, at_most, at_most)}"
            if at_most
            else f"set parallel.data={num_sequences}"
        )
        yield Violation(
            (*sequences, "parallel.data"),
            f"each mini-batch has {num_sequences} / {t.minibatches_per_step} = {plural(each, 'sequence')}, "
            f"fewer than parallel.data={data} ranks",
            advice,
        )
    if t.deal == "groups" and t.minibatches_per_step > r.prompts_per_step:
        yield Violation(
            ("train.minibatches_per_step", "rollout.prompts_per_step", "train.deal"),
            f'train.minibatches_per_step={t.minibatches_per_step} with train.deal="groups": the groups of '
            f"{plural(r.prompts_per_step, 'prompt')} make at most as many mini-batches",
            f"set train.minibatches_per_step={nearest_divisor(num_sequences, r.prompts_per_step, r.prompts_per_step)}",
        )
    if r.samples_per_prompt < 2 and config.advantage.needs_group:
        yield Violation(
            ("rollout.samples_per_prompt", "advantage.kind"),
            f"rollout.samples_per_prompt={r.samples_per_prompt}: an advantage compares the responses to one prompt "
            "and needs at least 2",
            'set rollout.samples_per_prompt=8, or advantage.kind="gae", which has a critic',
        )
    own_age = t.minibatches_per_step * t.epochs_per_step - 1
    ages = ("rollout.max_staleness", "train.minibatches_per_step", "train.epochs_per_step")
    if r.max_staleness is not None and r.max_staleness < own_age:
        yield Violation(
            ages,
            f"rollout.max_staleness={r.max_staleness}, but the {own_age + 1} updates of one step already age its "
            f"samples by up to {own_age}",
            f"set rollout.max_staleness={own_age} or more",
        )
    needed = 2 * own_age + 1
    if r.overlap and (r.max_staleness is None or own_age <= r.max_staleness < needed):
        yield Violation(
            (*ages, "rollout.overlap"),
            f"rollout.overlap=true trains samples that are at least one step old, so it needs a bound of at least "
            f"2 x {own_age + 1} - 1 = {plural(needed, 'update')}",
            f"set rollout.max_staleness={needed} or more, such as {needed + own_age + 1}",
        )


def nearest_divisor(number: int, wanted: int, at_most: int | None = None) -> int:
    """Return the divisor of `number`, up to `at_most`, that is nearest to `wanted`; the smaller one of two."""
    fitting = [n for n in divisors(number) if n <= (at_most or number)]
    return min(fitting, key=lambda n: (abs(n - wanted), n))


def divisors(number: int) -> list[int]:
    smaller = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return [n for small in smaller for n in (small, number // small)]


def check_sync(config: Config) -> Iterator[Violation]:
    """Check that the other ranks wait long enough for a weight update."""
    wait_s, patience_s = config.sync.timeout_s, config.parallel.timeout_s
    if config.parallel.size > 1 and 4 * wait_s > patience_s:
        yield warning(
            ("sync.timeout_s", "parallel.timeout_s", *RANKS),
            f"sync.timeout_s={wait_s:g}: the other trainer ranks wait at most parallel.timeout_s={patience_s:g} s for "
            "the first one, which may have to wait for a hung engine in several stages of a weight update",
            f"set sync.timeout_s={patience_s / 4:g} or less, or parallel.timeout_s={4 * wait_s:g}",
        )
