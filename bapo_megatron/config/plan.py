"""Checks across sections: layout, batch arithmetic, model limits. Numbers and a working alternative in each message."""

import math
import netrc
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from bapo_megatron.config import precision
from bapo_megatron.config.advantages import ADVANTAGE, advantage_function
from bapo_megatron.config.base import Severity, Violation, warning
from bapo_megatron.config.dotted import KEEP_GROUP, REWARD
from bapo_megatron.config.engines import check_engine
from bapo_megatron.config.idle import idle_settings
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.lr_schedule import planned_updates
from bapo_megatron.config.schema import FORWARDS_FIRST_MEMORY_SHARE, Config, RewardConfig, SourceConfig
from bapo_megatron.errors import UserError, plural
from bapo_megatron.hf.shape import layout_problems, model_shape, unsupported

_CPU_CHUNK_ROWS = 256
_GPU_CHUNK_BYTES = 1 << 30  # of float32 logits

RANKS = ("parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.data")
"""Settings whose product is the number of trainer ranks."""

# Arguments of SGLang that the launcher sets, and where to set them instead.
OWN_SGLANG_ARGUMENTS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "host": 'rollout.engine="attach" for servers elsewhere',
    "port": 'rollout.engine="attach" for servers of your own',
    "tensor_parallel_size": "rollout.server_tensor_parallel",
    "tp_size": "rollout.server_tensor_parallel",
    "context_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_running_requests": "rollout.max_concurrent_requests",
    "api_key": 'rollout.engine="attach" and rollout.api_key for servers with a key of your own',
    "admin_api_key": 'rollout.engine="attach" and rollout.api_key for servers with a key of your own',
    "tokenizer_worker_num": 'rollout.engine="attach": a server of several workers does not ask for the key of the run',
    "grpc_port": 'rollout.engine="attach": that port does not ask for the key of the run',
}


def check(
    config: Config,
    *,
    hf_config: dict[str, Any] | None,
    reference_config: dict[str, Any] | None = None,
    num_gpus: int = 0,
    starts_here: bool = False,
    machine: precision.Machine | None = None,
    given: Collection[str] | None = None,
) -> list[Violation]:
    """Find all violations across sections, layout first. Engine and family can be loaded: see `check_functions`.

    Args:
        hf_config: the model's config.json; None leaves the model's own limits unchecked.
        reference_config: the config.json of `loss.reference_path`, if a KL term has one.
        num_gpus: GPUs of this machine that a run may use; 0 is a run on CPUs.
        starts_here: whether the run starts on this machine: then it must have the GPUs that the run needs.
        machine: its facts for FP8; None leaves them unchecked.
        given: settings to warn of if they have no effect; None stands for all.
    """
    own = config.model.own_family
    shape = None if hf_config is None or unsupported(hf_config, own) else model_shape(hf_config, own=own)
    found = [
        *_layout(config),
        *_gpus(config, num_gpus),
        *_batch(config),
        *_rollout(config),
        *_shared_cores(config, num_gpus),
        *_engines(config),
        *_cut(config),
        *_data(config),
        *_reward(config),
        *_eval(config),
        *_loss(config),
        *_kl(config),
        *_schedule(config, given),
        *_critic(config),
        *_sync(config),
        *check_monitor(config),
        *idle_settings(config, given),
        *precision.check_precision(config, shape=shape, machine=machine, num_gpus=num_gpus),
    ]
    if hf_config is not None:
        found += _model(config, hf_config)
        if reference_config is not None:
            found += check_reference(config, reference_config, hf_config)
    if config.model.dtype == "bfloat16" and not num_gpus:
        problem, remedy = 'model.dtype="bfloat16" needs a GPU, and none is visible here', 'set it to "float32" on CPUs'
        severity: Severity = "error" if starts_here else "warning"
        found.append(Violation(("model.dtype", "cluster.gpu"), problem, remedy, severity))
    return found


def num_ranks(config: Config) -> int:
    """Count trainer processes: tensor x pipeline x context x data."""
    p = config.parallel
    return p.tensor * p.pipeline * p.context * p.data


def divide_cores(config: Config, num_cores: int, num_ranks: int, num_engine_processes: int) -> tuple[int, int]:
    """Return the threads of a trainer rank and of an engine process, on a machine with these numbers of them.

    By turns, each side takes all cores. With rollout.overlap both run together, and share them: half each, or what the
    other side's setting leaves. A process has at least one thread.
    """
    per_rank, per_engine = config.parallel.threads_per_rank, config.rollout.engine_threads
    for_trainer = for_engines = num_cores
    if config.rollout.overlap and num_ranks and num_engine_processes:
        for_engines = num_cores // 2 if per_rank is None else num_cores - per_rank * num_ranks
        for_trainer = num_cores - (for_engines if per_engine is None else per_engine * num_engine_processes)
    return (
        per_rank or max(1, for_trainer // max(1, num_ranks)),
        per_engine or max(1, for_engines // max(1, num_engine_processes)),
    )


def summarize(config: Config) -> str:
    """Summarise a run of this configuration in a few lines."""
    p, r, t = config.parallel, config.rollout, config.train
    num_sequences = r.prompts_per_step * r.samples_per_prompt
    num_updates = t.minibatches_per_step * t.epochs_per_step
    partial = f"{plural(r.tokens_per_round, 'token')} a round" if r.tokens_per_round else "off"
    num_servers = r.num_started or len(r.urls)
    engines = plural(num_servers, r.engine_kind.title) if r.engine_kind.samples else "recorded batches"
    return "\n".join(
        [
            f"run        {config.run.name}: {plural(t.num_steps, 'step')}, "
            f"{plural(t.num_steps * num_updates, 'optimizer update')}",
            f"trainer    {plural(num_ranks(config), 'rank')} = tensor {p.tensor} x pipeline {p.pipeline} x context "
            f"{p.context} x data {p.data}",
            f"step       {plural(r.prompts_per_step, 'prompt')} x {plural(r.samples_per_prompt, 'sample')} = "
            f"{plural(num_sequences, 'sequence')}, at most "
            f"{plural(num_sequences * r.max_response_tokens, 'response token', ',')}",
            f"updates    {plural(t.minibatches_per_step, 'mini-batch')} of "
            f"{plural(num_sequences // t.minibatches_per_step, 'sequence')} x {plural(t.epochs_per_step, 'epoch')} = "
            f"{num_updates} a step",
            f"forward    at most {plural(max_microbatches(config), 'micro-batch')} of "
            f"{plural(t.max_tokens_per_microbatch, 'token')} per rank and update",
            f"rollout    {engines}, {plural(r.groups_in_flight or r.prompts_per_step, 'group')} in flight, "
            f"partial rollout {partial}",
        ]
    )


def max_microbatches(config: Config) -> int:
    """Count the micro-batches of one update on one data rank if every prompt and response is as long as allowed."""
    r = config.rollout
    per_minibatch = r.prompts_per_step * r.samples_per_prompt // config.train.minibatches_per_step
    per_rank = -(-per_minibatch // config.parallel.data)
    longest = config.data.max_prompt_tokens + r.max_response_tokens
    budget = config.train.max_tokens_per_microbatch * config.parallel.context
    per_microbatch = max(1, budget // longest)
    return -(-per_rank // per_microbatch)


def chunk_rows(vocab_rows: int, *, on_gpu: bool) -> int:
    """Return the number of rows whose logits exist together, if `train.logprob_chunk_tokens` is unset.

    On a GPU, chunks are large: each one reads and writes the gradient of all `vocab_rows` of this rank's weight.
    """
    fitting = _GPU_CHUNK_BYTES // (4 * vocab_rows) if on_gpu else _CPU_CHUNK_ROWS
    return max(1, fitting // _CPU_CHUNK_ROWS) * _CPU_CHUNK_ROWS


def runs_forwards_first(
    config: Config, num_microbatches: int, *, layer_input_bytes: float, memory_bytes: float | None
) -> bool:
    """Decide whether all forward passes of a mini-batch come before its backward passes.

    `auto` does so if it needs little more memory than the other order (measured in docs/performance.md): with one
    micro-batch, or if only the layers' inputs are kept (`train.recompute`).

    Args:
        layer_input_bytes: inputs of a rank's layers for all these micro-batches.
        memory_bytes: of the smallest device; None if it is not known.
    """
    order = config.train.schedule
    if config.parallel.pipeline > 1 or order == "interleaved":
        return False
    if order == "forwards_first" or num_microbatches == 1:
        return True
    if not config.train.recomputes_all or memory_bytes is None:
        return False
    return layer_input_bytes <= FORWARDS_FIRST_MEMORY_SHARE * memory_bytes


def check_functions(config: Config) -> Iterator[Violation]:
    """Load the functions at dotted paths. A judge is loaded in a process of its own, by preflight/inputs.py."""
    advantage, rollout, loss = config.advantage.kind, config.rollout, config.loss
    try_to: dict[str, Callable[[], object]] = {
        "rollout.engine": lambda: check_engine(rollout.engine),
        "model.family": lambda: config.model.own_family,
    }
    if loss.name not in LOSSES:
        try_to["loss.name loss.options"] = lambda: (loss.function_options, loss.rule)
    if advantage not in ADVANTAGE.names:
        try_to["advantage.kind"] = lambda: advantage_function(advantage)
    if rollout.keep_group not in KEEP_GROUP.names:
        try_to["rollout.keep_group"] = lambda: KEEP_GROUP.load(rollout.keep_group)
    for settings, load in try_to.items():
        try:
            load()
        except UserError as error:
            yield Violation(tuple(settings.split()), str(error))


def _layout(config: Config) -> Iterator[Violation]:
    p, product = config.parallel, num_ranks(config)
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
            f"parallel.virtual_pipeline={p.virtual_pipeline} cuts pipeline stages into chunks and needs "
            "parallel.pipeline above 1",
            "set parallel.virtual_pipeline=1",
        )
    if config.train.schedule == "forwards_first" and p.pipeline > 1:
        yield Violation(
            ("train.schedule", "parallel.pipeline"),
            f'train.schedule="forwards_first" is not possible with parallel.pipeline={p.pipeline}, whose stages pass '
            "micro-batches on in an order of their own",
            'set train.schedule="auto"',
        )
    if config.optimizer.distributed and p.data * p.context == 1 and config.cluster.gpu is None:
        yield warning(
            ("optimizer.distributed", "parallel.data", "parallel.context", "cluster.gpu"),
            "optimizer.distributed=true splits Adam's state over parallel.data x context ranks, and there is one",
            "set optimizer.distributed=false",
        )
    if p.sequence and p.tensor == 1:
        yield Violation(
            ("parallel.sequence", "parallel.tensor"),
            "parallel.sequence=true splits within the tensor-parallel group and needs parallel.tensor above 1",
            "set parallel.sequence=false",
        )


def _gpus(config: Config, num_gpus: int) -> Iterator[Violation]:
    """Count GPUs: each rank and server needs its own, as NCCL refuses a group with two members on one."""
    c, r, ranks = config.cluster, config.rollout, num_ranks(config)
    on_servers = r.num_server_gpus
    needed = ranks + on_servers
    if not num_gpus or needed <= num_gpus:
        return
    each = plural(r.server_tensor_parallel, "GPU")
    servers = f" and {plural(r.num_servers, r.engine_kind.title)} x {each}" if on_servers else ""
    lower = f"lower parallel.*{', rollout.num_servers or rollout.server_tensor_parallel' if on_servers else ''}"
    there = f"{num_gpus} {'is' if num_gpus == 1 else 'are'} visible"
    remedy = f'{lower}, or set CUDA_VISIBLE_DEVICES="" to run on CPUs'
    if c.gpu is not None and num_gpus == c.nodes * c.gpus_per_node:
        there = f"cluster.nodes x gpus_per_node = {c.nodes} x {c.gpus_per_node} = {num_gpus}"
        remedy = f"set cluster.nodes={-(-needed // c.gpus_per_node)} (and submit it with `bapo slurm`), or {lower}"
    yield Violation(
        (*RANKS, "rollout.engine", "rollout.num_servers", "rollout.server_tensor_parallel", "cluster"),
        f"{plural(ranks, 'trainer rank')}{servers} {'needs' if needed == 1 else 'need'} {plural(needed, 'GPU')}, and "
        f"{there}",
        remedy,
    )


def _batch(config: Config) -> Iterator[Violation]:
    r, t, data = config.rollout, config.train, config.parallel.data
    num_sequences = r.prompts_per_step * r.samples_per_prompt
    sequences = ("train.minibatches_per_step", "rollout.prompts_per_step", "rollout.samples_per_prompt")
    if num_sequences % t.minibatches_per_step:
        nearest = _nearest_divisor(num_sequences, t.minibatches_per_step)
        yield Violation(
            sequences,
            f"train.minibatches_per_step={t.minibatches_per_step} does not divide rollout.prompts_per_step x "
            f"samples_per_prompt = {r.prompts_per_step} x {r.samples_per_prompt} = {plural(num_sequences, 'sequence')}",
            f"set train.minibatches_per_step={nearest}",
        )
    elif (each := num_sequences // t.minibatches_per_step) < data:
        at_most = num_sequences // data
        advice = (
            f"set train.minibatches_per_step={_nearest_divisor(num_sequences, at_most, at_most)}"
            if at_most
            else f"set parallel.data={num_sequences}"
        )
        yield Violation(
            (*sequences, "parallel.data"),
            f"each mini-batch has {num_sequences} / {t.minibatches_per_step} = {plural(each, 'sequence')}, "
            f"fewer than parallel.data={data} ranks",
            advice,
        )
    if r.samples_per_prompt < 2 and config.advantage.compares_responses:
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


def _nearest_divisor(number: int, wanted: int, at_most: int | None = None) -> int:
    smaller = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = [n for small in smaller for n in (small, number // small) if n <= (at_most or number)]
    return min(divisors, key=lambda n: (abs(n - wanted), n))


def _shared_cores(config: Config, num_gpus: int) -> Iterator[Violation]:
    r = config.rollout
    shares = r.num_started and not r.engine_kind.on_gpus and not num_gpus and config.cluster.gpu is None
    if r.overlap and shares:
        yield warning(
            ("rollout.overlap", "rollout.engine", "cluster.gpu"),
            "rollout.overlap=true, but trainer and engines share the cores of this machine, which each of them keeps "
            "busy by turns: steps take a little longer (docs/performance.md)",
            "set rollout.overlap=false, unless you try out a run whose engines will have devices of their own",
        )


def _rollout(config: Config) -> Iterator[Violation]:
    r = config.rollout
    if r.tokens_per_round is not None and r.tokens_per_round > r.max_response_tokens:
        yield Violation(
            ("rollout.tokens_per_round", "rollout.max_response_tokens"),
            f"rollout.tokens_per_round={r.tokens_per_round} is more than rollout.max_response_tokens="
            f"{r.max_response_tokens}",
            "set it below that, or leave it out to sample responses to their end",
        )
    groups = ("rollout.groups_in_flight", "rollout.prompts_per_step")
    if r.groups_in_flight is not None and r.groups_in_flight < r.prompts_per_step:
        yield Violation(
            groups,
            f"rollout.groups_in_flight={r.groups_in_flight} is fewer than the rollout.prompts_per_step="
            f"{r.prompts_per_step} groups that a step needs",
            f"set rollout.groups_in_flight={r.prompts_per_step} or more",
        )
    if r.abort_tail and not r.overlap and (r.groups_in_flight or r.prompts_per_step) == r.prompts_per_step:
        yield warning(
            ("rollout.abort_tail", "rollout.overlap", *groups),
            f"rollout.abort_tail=true has no tail to abort: rollout.groups_in_flight is the "
            f"{plural(r.prompts_per_step, 'group')} that a step needs",
            f"set rollout.groups_in_flight={2 * r.prompts_per_step}",
        )


def _engines(config: Config) -> Iterator[Violation]:
    r = config.rollout
    if r.engine == "attach" and not r.urls:
        yield Violation(
            ("rollout.urls", "rollout.engine"),
            'rollout.engine="attach" needs rollout.urls',
            'set it, such as rollout.urls=["http://127.0.0.1:30000"], or rollout.engine="embedded"',
        )
    if r.engine == "recorded" and r.recorded_from is None:
        yield Violation(
            ("rollout.recorded_from", "rollout.engine"),
            'rollout.engine="recorded" needs rollout.recorded_from, the `rollouts` folder of a run with '
            "rollout.record=true",
            'set it, or rollout.engine="embedded"',
        )
    if r.server_tensor_parallel > 1 and not r.engine_kind.tensor_parallel:
        yield Violation(
            ("rollout.server_tensor_parallel", "rollout.engine"),
            f"rollout.server_tensor_parallel={r.server_tensor_parallel}, but the {r.engine_kind.title} is one process",
            'set rollout.engine="sglang" or rollout.server_tensor_parallel=1',
        )
    for name in sorted(config.sglang.extra.keys() & OWN_SGLANG_ARGUMENTS.keys()):
        problem = f"sglang.extra.{name} is set by the launcher"
        yield Violation((f"sglang.extra.{name}",), problem, f"use {OWN_SGLANG_ARGUMENTS[name]}")
    if not r.engine_kind.answers_when_busy and r.hang_timeout_s < config.sync.timeout_s:
        yield warning(
            ("rollout.hang_timeout_s", "sync.timeout_s", "rollout.engine"),
            f"rollout.hang_timeout_s={r.hang_timeout_s:g} is below sync.timeout_s={config.sync.timeout_s:g}: a server "
            "may be killed in the middle of a weight update",
            f"set rollout.hang_timeout_s={config.sync.timeout_s:g}",
        )
    for url in r.urls if r.engine == "attach" else ():
        if server_address(url) is None:
            yield Violation(
                ("rollout.urls", "rollout.engine"),
                f'rollout.urls: "{url}" is not the URL of a server',
                'write it like "http://127.0.0.1:30000"',
            )
    share = config.sglang.extra.get("mem_fraction_static")
    if share is not None and not (type(share) in (int, float) and 0 < share < 1):
        yield Violation(
            ("sglang.extra.mem_fraction_static",),
            f"sglang.extra.mem_fraction_static={share!r} is not a share of a GPU's memory, for weights and KV cache",
            "set it between 0 and 1, such as 0.85, or leave it out",
        )


def _cut(config: Config) -> Iterator[Violation]:
    """Check that the engine returns the log-probs that top_p and top_k need; warn of the ratios that they lead to."""
    r, kind = config.rollout, config.rollout.engine_kind
    for table, cut in ({"rollout": r} | config.eval_sets).items():
        if not kind.samples or (cut.top_p == 1 and cut.top_k is None):
            continue
        given = f"{table}.top_p={cut.top_p:g}" if cut.top_p < 1 else f"{table}.top_k={cut.top_k}"
        settings = (f"{table}.top_k", f"{table}.top_p", "rollout.engine")
        if not kind.cuts:
            yield Violation(
                settings,
                f"{given}: the {kind.title} does not return log-probs of the distribution that a cut leaves",
                f'leave {table}.top_p and {table}.top_k out, or set rollout.engine="embedded"',
            )
        elif kind.max_cut_tokens is not None and (cut.top_k is None or cut.top_k > kind.max_cut_tokens):
            yield Violation(
                settings,
                f"{given}: the {kind.title} returns log-probs of the distribution that a cut leaves only with a top_k "
                f"of at most {kind.max_cut_tokens}",
                f"set {table}.top_k, such as {table}.top_k=1024",
            )
    if r.is_cut and config.loss.ratio_options is not None and not config.loss.scores_proximal:
        yield warning(
            ("loss.proximal", "loss.name", "rollout.top_p", "rollout.top_k"),
            "with rollout.top_p and rollout.top_k, the ratio of a token on policy is the kept mass, below 1: clipping "
            "sees the cut as a change of the policy (docs/bapo.md)",
            'set loss.proximal="learner" to clip changes only',
        )


_DEFAULT_PORTS = {"http": 80, "https": 443}


def server_address(url: str) -> tuple[str, int] | None:
    """Return host and port of a base URL; None if it is not one.

    Example: server_address("http://node3:30000") == ("node3", 30000); server_address("node3:30000") is None.
    """
    try:
        parts = urlsplit(url)
        port = _DEFAULT_PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:  # a port above 65535, or half an IPv6 address
        return None
    return (parts.hostname, port) if parts.hostname and port and parts.scheme in _DEFAULT_PORTS else None


def _data(config: Config) -> Iterator[Violation]:
    data = config.data
    if data.sources and data.path is not None:
        yield Violation(
            ("data.path", "data.sources"),
            f"data.path={data.path} names a file besides data.sources",
            "make it one of them, or leave it out",
        )
    if data.system_prompt is not None and not data.chat_template:
        yield Violation(
            ("data.chat_template", "data.system_prompt"),
            "data.system_prompt is used by the chat template only",
            "set data.chat_template=true, or leave data.system_prompt out",
        )
    for table, one in config.prompt_sources.items():
        yield from _source(table, one)


_PATHS = {"jsonl": "a file with one JSON object a line", "hub": 'the name of a data set, such as "openai/gsm8k"'}


def _source(table: str, one: SourceConfig) -> Iterator[Violation]:
    """Check one source of prompts, described by `table`: whether it names what it draws from, and nothing else."""
    decided_by = (f"{table}.source", *(["data.sources"] if table == "data" else []))  # [data] is read without sources
    if one.needs_path and one.path is None:
        problem = f'{table}.source="{one.source}" needs {table}.path'
        yield Violation((f"{table}.path", *decided_by), problem, f"set it to {_PATHS[one.source]}")
    if one.source == "reasoning_gym" and one.dataset is None:
        yield Violation(
            (f"{table}.dataset", *decided_by),
            f'{table}.source="reasoning_gym" needs {table}.dataset',
            f'set it, such as {table}.dataset="basic_arithmetic"',
        )
    if table != "data" and not one.needs_path and one.path is not None:
        problem = f'{table}.path={one.path} has no effect with source="{one.source}"'
        yield Violation((f"{table}.path", *decided_by), problem, "leave one of them out")


def _eval(config: Config) -> Iterator[Violation]:
    if config.eval.interval_steps is None:
        return
    for table, one in config.eval_sets.items() if config.eval.sets else ():
        yield from _source(table, one)
    if config.data.sources and not config.eval.sets:
        yield Violation(
            (*_EVALUATES, "data.sources"),
            "eval.interval_steps with data.sources needs eval.sets, which name the prompts to evaluate on",
            "set them, or leave eval.interval_steps out",
        )
    elif config.data.source == "jsonl" and config.eval.path is None and not config.eval.sets:
        yield Violation(
            ("eval.path", *_EVALUATES, "data.source", "data.sources"),
            'eval.interval_steps with data.source="jsonl" needs eval.path, a file of prompts to evaluate on',
            "set it, or leave eval.interval_steps out",
        )
    elif config.data.has_rows and config.data.source != "jsonl" and not config.eval.sets:
        yield Violation(
            (*_EVALUATES, "data.source", "data.sources"),
            f'eval.interval_steps with data.source="{config.data.source}" needs eval.sets, which name the prompts to '
            "evaluate on",
            "set them, or leave eval.interval_steps out",
        )
    if not config.rollout.engine_kind.samples:
        yield Violation(
            ("eval.interval_steps", "rollout.engine"),
            f'eval.interval_steps needs engines to ask, and rollout.engine="{config.rollout.engine}" has none',
            'leave it out, or set rollout.engine="embedded"',
        )


_EVALUATES = ("eval.sets", "eval.interval_steps")


def _reward(config: Config) -> Iterator[Violation]:
    """Check the settings of judging and shaping against each other."""
    reward, r = config.reward, config.rollout
    if reward.overlong_buffer_tokens > r.max_response_tokens:
        yield Violation(
            ("reward.overlong_buffer_tokens", "rollout.max_response_tokens"),
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} is more than rollout.max_response_tokens="
            f"{r.max_response_tokens}: even an empty response would be punished",
            f"set reward.overlong_buffer_tokens={max(1, r.max_response_tokens // 5)}",
        )
    if r.truncated == "mask" and reward.overlong_penalty:
        yield warning(
            ("rollout.truncated", "reward.overlong_penalty"),
            'rollout.truncated="mask" keeps truncated responses out of the loss, so that reward.overlong_penalty='
            f"{reward.overlong_penalty:g} teaches little",
            'set rollout.truncated="keep" or reward.overlong_penalty=0',
        )
    if r.keep_group == "informative" and r.samples_per_prompt == 2:
        yield warning(
            ("rollout.samples_per_prompt", "rollout.keep_group"),
            'rollout.keep_group="informative" with rollout.samples_per_prompt=2 drops most groups: two responses often '
            "get the same reward",
            'set rollout.samples_per_prompt=8, or rollout.keep_group="all"',
        )
    if r.keep_group == "informative" and config.train.entropy_coef:
        yield warning(
            ("rollout.keep_group", "train.entropy_coef"),
            f"train.entropy_coef={config.train.entropy_coef:g} rewards entropy on groups of equal rewards too, and "
            'rollout.keep_group="informative" leaves these out of the batch',
            'set rollout.keep_group="all"',
        )
    yield from _parts(reward)
    for table, one in config.prompt_sources.items():
        if reward.kind == "code" and not one.has_rows:
            yield Violation(
                (f"{table}.source", "reward.kind", "data.sources"),
                f'reward.kind="code" needs prompts with tests, but {table}.source={one.source!r} has none',
                f'set {table}.source="jsonl"',
            )
    is_scaled = reward.scale != 1 or reward.running_std
    scaling = ("advantage.kind", "reward.scale", "reward.running_std", "reward.clip")
    if config.advantage.divides_by_std and is_scaled and reward.clip is None:
        name = "reward.running_std" if reward.running_std else f"reward.scale={reward.scale:g}"
        yield warning(
            scaling,
            f'{name} does nothing with advantage.kind="{config.advantage.kind}", which divides by the standard '
            "deviation of each group",
            'set advantage.kind="dr_grpo" or "rloo"',
        )
    if config.advantage.whiten_batch and is_scaled and reward.clip is None and not config.advantage.divides_by_std:
        yield warning(
            ("advantage.whiten_batch", *scaling),
            "advantage.whiten_batch=true divides by the standard deviation of the batch, so that reward.scale and "
            "reward.running_std do nothing",
            "leave one of them out",
        )


def _parts(reward: RewardConfig) -> Iterator[Violation]:
    """Check which judges give the parts of the reward that have weights."""
    weights = ("reward.weights", "reward.judges", "reward.kind")
    if reward.judges and reward.kind != "auto":
        yield Violation(
            ("reward.kind", "reward.judges"),
            f'reward.kind="{reward.kind}" names a judge besides reward.judges',
            "make it one of them, or leave it out",
        )
    unknown = sorted(reward.weights.keys() - reward.judges.keys()) if reward.judges else []
    if unknown:
        names = ", ".join(reward.judges)
        yield Violation(
            weights, f"reward.weights.{unknown[0]} is not a part of reward.judges ({names})", "leave it out"
        )
    elif reward.weights and not reward.judges and reward.kind in REWARD.names:
        yield Violation(
            weights,
            f'reward.weights names parts, and reward.kind="{reward.kind}" returns a number',
            "leave it out, or set reward.judges",
        )


def _loss(config: Config) -> Iterator[Violation]:
    loss, train = config.loss, config.train
    if loss.scores_proximal and train.minibatches_per_step * train.epochs_per_step == 1:
        yield warning(
            ("train.minibatches_per_step", "train.epochs_per_step", "loss.proximal"),
            'loss.proximal="learner" clips the ratio to the weights that the step began with, which is 1 in its only '
            "update: nothing is ever clipped",
            "set train.minibatches_per_step=2 or more to let the bounds act",
        )
    if config.loss.searches_bounds and config.bapo.scope == "microbatch":
        yield warning(
            ("bapo.scope", "loss.name", "loss.search_bounds"),
            'bapo.scope="microbatch" gives every micro-batch bounds of its own, as the authors\' recipe does: results '
            f"depend on train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch} and on the number of "
            "data and context ranks",
            'set bapo.scope="exact" for results that do not',
        )


def _kl(config: Config) -> Iterator[Violation]:
    loss = config.loss
    if not loss.kl_coef:
        if loss.kl_target is not None:
            yield Violation(
                ("loss.kl_coef", "loss.kl_target"),
                f"loss.kl_target={loss.kl_target:g} multiplies loss.kl_coef, which is 0 and would stay so",
                "set loss.kl_coef=0.1, or leave loss.kl_target out",
            )
        return
    if loss.kl_estimator == "k1":
        yield warning(
            ("loss.kl_estimator", "loss.kl_coef"),
            'loss.kl_estimator="k1" has a gradient of 0 on average, on samples of the policy itself: as a term of the '
            "loss it adds noise and holds nothing back",
            'set loss.kl_estimator="k2" or "k3"',
        )


def check_reference(config: Config, reference: dict[str, Any], policy: dict[str, Any]) -> Iterator[Violation]:
    """Check that the model of `loss.reference_path` can be compared with the policy, and split like it.

    Args:
        reference, policy: their config.json.
    """
    settings, name = ("loss.reference_path", "loss.kl_coef"), f"loss.reference_path={config.loss.reference_path!r}"
    if (size := reference.get("vocab_size")) != policy.get("vocab_size"):
        yield Violation(
            (*settings, "model.path"),
            f"{name} has a vocabulary of {size} tokens, the policy one of {policy.get('vocab_size')}: log-probs of the "
            "same tokens cannot be compared",
            "set it to a model of the policy's family, or leave it out",
        )
    for violation in _split(config, reference, "loss.reference_path"):
        yield replace(violation, settings=(*settings, *violation.settings[1:]), problem=f"{name}: {violation.problem}")


def _split(config: Config, hf_config: dict[str, Any], model: str) -> Iterator[Violation]:
    """Check that the model which the setting `model` names is supported, and can be split over the ranks."""
    p, own = config.parallel, config.model.own_family
    if problems := unsupported(hf_config, own):
        yield from (Violation((model,), problem) for problem in problems)
        return
    shape = model_shape(hf_config, own=own)
    for setting, (problem, remedy) in layout_problems(shape, p.tensor, p.pipeline, p.virtual_pipeline).items():
        yield Violation((f"parallel.{setting}", model), problem, remedy)


def _schedule(config: Config, given: Collection[str] | None) -> Iterator[Violation]:
    optimizer, num_updates = config.optimizer, planned_updates(config)
    if optimizer.warmup_updates < num_updates:
        return
    settings = (
        "optimizer.warmup_updates",
        "optimizer.schedule",
        "optimizer.total_updates",
        "train.num_steps",
        "train.minibatches_per_step",
        "train.epochs_per_step",
        "train.rollout_only",
    )
    remedy = f"set optimizer.warmup_updates={num_updates // 10} or so"
    if optimizer.schedule == "constant":
        is_given = given is None or "optimizer.warmup_updates" in given  # else this is a short trial of a recipe
        if is_given and optimizer.warmup_updates > num_updates and not config.train.rollout_only:
            yield warning(
                settings,
                f"optimizer.warmup_updates={optimizer.warmup_updates} is longer than the run of "
                f"{plural(num_updates, 'update')}, which ends at {num_updates / optimizer.warmup_updates:.2g} of "
                "optimizer.lr",
                remedy,
            )
    else:
        yield Violation(
            settings,
            f"optimizer.warmup_updates={optimizer.warmup_updates} leaves nothing of the "
            f'{plural(num_updates, "update")} for optimizer.schedule="{optimizer.schedule}"',
            remedy,
        )


def _critic(config: Config) -> Iterator[Violation]:
    """Find settings of groups that a critic does not need, and a critic that trains for the whole run."""
    advantage, critic, r = config.advantage, config.critic, config.rollout
    if advantage.compares_responses:
        return
    if advantage.whiten_batch:
        yield Violation(
            ("advantage.whiten_batch", "advantage.kind"),
            f'advantage.whiten_batch=true is for one advantage per response, and advantage.kind="{advantage.kind}" has '
            "one per token",
            "set advantage.whiten_tokens instead",
        )
    if critic.warmup_steps >= config.train.num_steps and not config.train.rollout_only:
        yield warning(
            ("train.num_steps", "critic.warmup_steps", "advantage.kind", "train.rollout_only"),
            f"critic.warmup_steps={critic.warmup_steps} of train.num_steps={config.train.num_steps} steps train the "
            "critic only: the policy would never change",
            "set train.num_steps above it",
        )
    if r.keep_group == "informative":
        cost = "are all there are" if r.samples_per_prompt == 1 else "teach a critic as much as others"
        yield Violation(
            ("rollout.keep_group", "rollout.samples_per_prompt", "advantage.kind"),
            f'rollout.keep_group="informative" leaves out groups of equal rewards, which {cost} with '
            f'rollout.samples_per_prompt={r.samples_per_prompt} and advantage.kind="{advantage.kind}"',
            'set rollout.keep_group="all"',
            "error" if r.samples_per_prompt == 1 else "warning",
        )
    if r.truncated == "mask":
        yield warning(
            ("rollout.truncated", "advantage.kind"),
            'rollout.truncated="mask": the critic does not learn from truncated responses either, and so predicts the '
            "rewards of complete responses only",
            'set rollout.truncated="keep"',
        )


def _sync(config: Config) -> Iterator[Violation]:
    wait_s, patience_s = config.sync.timeout_s, config.parallel.timeout_s
    if num_ranks(config) > 1 and 4 * wait_s > patience_s:
        yield warning(
            ("sync.timeout_s", "parallel.timeout_s", *RANKS),
            f"sync.timeout_s={wait_s:g}: the other trainer ranks wait at most parallel.timeout_s={patience_s:g} s for "
            "the first one, which may have to wait for a hung engine in several stages of a weight update",
            f"set sync.timeout_s={patience_s / 4:g} or less, or parallel.timeout_s={4 * wait_s:g}",
        )


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}
"""Modules by the extra that installs them: a sink, or the endpoint of monitor.prometheus_port."""


def check_monitor(config: Config) -> Iterator[Violation]:
    """Find missing packages before anything starts."""
    users: dict[str, tuple[str, str, str]] = {
        sink: ("monitor.sinks", f'monitor.sinks has "{sink}"', f'take "{sink}" out of it')
        for sink in config.monitor.sinks
    }
    if (port := config.monitor.prometheus_port) is not None:
        users["prometheus"] = ("monitor.prometheus_port", f"monitor.prometheus_port={port}", "leave it out")
    for extra, (name, setting, instead) in users.items():
        if find_spec(PACKAGES[extra]) is None:
            yield Violation(
                (name,),
                f"{setting}, and the package {PACKAGES[extra].replace('_', '-')} is not installed",
                f"run `pip install 'bapo-megatron[{extra}]'`, or {instead}",
            )
        elif extra == "wandb" and not _has_wandb_key():
            yield Violation(
                (name,),
                f"{setting}, and there is no key for Weights & Biases",
                f"run `wandb login`, set WANDB_API_KEY, set WANDB_MODE=offline to send the metrics later, or {instead}",
            )


def _has_wandb_key() -> bool:
    """Return whether W&B finds a key where it looks for one, or needs none."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in map(os.path.expanduser, files):
        try:
            if host and host in netrc.netrc(file).hosts:
                return True
        except (OSError, netrc.NetrcParseError):  # W&B asks for a key there, too
            continue
    return False


def _model(config: Config, hf_config: dict[str, Any]) -> Iterator[Violation]:
    own, model_type = config.model.own_family, hf_config.get("model_type")
    if own is not None and own.model_type != model_type:
        yield Violation(
            ("model.family", "model.path"),
            f'model.family="{config.model.family}" is for model_type {own.model_type!r}, and the config.json of '
            f"model.path={config.model.path!r} has {model_type!r}",
            "leave model.family out, or set model.path to a model of that type",
        )
        return
    yield from _split(config, hf_config, "model.path")
    heads, ranks = hf_config.get("num_attention_heads"), config.rollout.server_tensor_parallel
    if isinstance(heads, int) and heads % ranks:
        yield Violation(
            ("rollout.server_tensor_parallel", "model.path"),
            f"rollout.server_tensor_parallel={ranks} does not divide the model's num_attention_heads={heads}",
            f"set rollout.server_tensor_parallel={_nearest_divisor(heads, ranks)}",
        )
    positions = hf_config.get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    settings = ("data.max_prompt_tokens", "rollout.max_response_tokens", "model.path")
    if isinstance(positions, int) and prompt + response > positions:
        fitting = positions - response if response < positions else positions // 2
        advice = f"set data.max_prompt_tokens={fitting}"
        if response >= positions:
            advice += f" and rollout.max_response_tokens={positions - fitting}"
        yield Violation(
            settings,
            f"data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} = {prompt + response} is "
            f"more than the model's max_position_embeddings={positions}",
            advice,
        )
    elif isinstance(positions, int) and config.longest_sequence > positions:
        yield Violation(
            (*_EVALUATES, *settings),
            f"data.max_prompt_tokens + the longest max_response_tokens of eval.sets = {config.longest_sequence} is "
            f"more than the model's max_position_embeddings={positions}",
            f"set max_response_tokens={positions - prompt} there",
        )
