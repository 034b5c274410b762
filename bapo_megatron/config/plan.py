"""Checks across sections: layout, batch arithmetic, model limits. Numbers and a working alternative in each message."""

import math
import netrc
import os
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from bapo_megatron.config import precision
from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.dotted import ADVANTAGE, KEEP_GROUP
from bapo_megatron.config.engines import check_engine
from bapo_megatron.config.idle import idle_settings
from bapo_megatron.config.lr_schedule import planned_updates
from bapo_megatron.config.schema import FORWARDS_FIRST_MEMORY_SHARE, Config, RolloutConfig, SourceConfig
from bapo_megatron.config.schema_loss import CustomLoss, RatioLoss
from bapo_megatron.errors import UserError
from bapo_megatron.hf.shape import model_shape, unsupported, validate_layout

_CPU_CHUNK_ROWS = 256
_GPU_CHUNK_BYTES = 1 << 30  # of float32 logits

# Arguments of SGLang that the launcher sets, and where to set them instead.
OWN_SGLANG_ARGUMENTS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "host": 'rollout.engine="attach" for servers elsewhere',
    "port": 'rollout.engine="attach" for servers of your own',
    "tensor_parallel_size": "rollout.server_tensor_parallel",
    "tp_size": "rollout.server_tensor_parallel",
    "context_length": "rollout.engine_max_context",
    "max_running_requests": "rollout.max_concurrent_requests",
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
    """Find all violations across sections, layout first.

    Args:
        hf_config: the model's config.json; None leaves the model's own limits unchecked.
        reference_config: the config.json of `loss.reference_path`, if a KL term has one.
        num_gpus: GPUs of this machine that a run may use; 0 is a run on CPUs.
        starts_here: whether the run starts on this machine: then it must have the GPUs that the run needs.
        machine: its facts for FP8; None leaves them unchecked.
        given: settings to warn of if they have no effect; None: all.
    """
    found = list(_functions(config))
    if any(v.message.startswith("rollout.engine=") for v in found):
        return found  # the other checks ask what the engine can do
    shape = None if hf_config is None or unsupported(hf_config) else model_shape(hf_config)
    found += [
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
        *(Violation(message) for message in precision.problems(config, shape=shape, machine=machine)),
        *(warning(message) for message in precision.warnings(config, num_gpus=num_gpus)),
    ]
    if hf_config is not None:
        found += _model(config, hf_config)
        if reference_config is not None:
            found += check_reference(config, reference_config, hf_config)
    if config.model.dtype == "bfloat16" and not num_gpus:
        message = 'model.dtype="bfloat16" needs a GPU, and none is visible here: on CPUs set model.dtype="float32"'
        found.append(Violation(message) if starts_here else warning(message))
    return found


def num_ranks(config: Config) -> int:
    """Count trainer processes: tensor x pipeline x context x data."""
    p = config.parallel
    return p.tensor * p.pipeline * p.context * p.data


def divide_cores(config: Config, num_cores: int, num_ranks: int, num_engine_processes: int) -> tuple[int, int]:
    """Return the threads of a trainer rank and of an engine process, on a machine that holds so many of each.

    By turns, each side takes all cores. With rollout.overlap both run at once, and share them: half each, or what the
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
    partial = f"{r.tokens_per_round} tokens a round" if r.tokens_per_round else "off"
    num_servers = r.num_started or len(r.urls)
    engines = f"{num_servers} {r.engine_kind.title}s" if r.engine_kind.samples else "recorded batches"
    return "\n".join(
        [
            f"run        {config.run.name}: {t.num_steps} steps, {t.num_steps * num_updates} optimizer updates",
            f"trainer    {num_ranks(config)} ranks = tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} "
            f"x data {p.data}",
            f"step       {r.prompts_per_step} prompts x {r.samples_per_prompt} samples = {num_sequences} sequences, "
            f"at most {num_sequences * r.max_response_tokens} response tokens",
            f"updates    {t.minibatches_per_step} mini-batches of {num_sequences // t.minibatches_per_step} sequences "
            f"x {t.epochs_per_step} epochs = {num_updates} a step",
            f"forward    at most {max_microbatches(config)} micro-batches of {t.max_tokens_per_microbatch} tokens "
            "per rank and update",
            f"rollout    {engines}, {r.groups_in_flight or r.prompts_per_step} groups in flight, "
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
    """Return the number of rows whose logits exist at once, if `train.logprob_chunk_tokens` is unset.

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
        memory_bytes: of the smallest device; None: not known.
    """
    order = config.train.schedule
    if config.parallel.pipeline > 1 or order == "interleaved":
        return False
    if order == "forwards_first" or num_microbatches == 1:
        return True
    if not config.train.recomputes_all or memory_bytes is None:
        return False
    return layer_input_bytes <= FORWARDS_FIRST_MEMORY_SHARE * memory_bytes


def _functions(config: Config) -> Iterator[Violation]:
    """Load the functions at dotted paths. A judge is loaded in a process of its own, by preflight/check.py."""
    advantage, rollout, loss = config.advantage.kind, config.rollout, config.loss
    try_to: list[Callable[[], object]] = [lambda: check_engine(rollout.engine)]
    if isinstance(loss, CustomLoss):
        try_to.append(lambda: loss.function)
    if advantage not in ADVANTAGE.names:
        try_to.append(lambda: ADVANTAGE.load(advantage))
    if rollout.keep_group not in KEEP_GROUP.names:
        try_to.append(lambda: KEEP_GROUP.load(rollout.keep_group))
    for load in try_to:
        try:
            load()
        except UserError as error:
            yield Violation(str(error))


def _layout(config: Config) -> Iterator[Violation]:
    p, product = config.parallel, num_ranks(config)
    if p.num_ranks is not None and p.num_ranks != product:
        data, rest = divmod(p.num_ranks, product // p.data)
        advice = ", or leave it out" if rest else f" or parallel.data={data}"
        yield Violation(
            f"parallel.num_ranks={p.num_ranks}, but tensor x pipeline x context x data = {p.tensor} x {p.pipeline} x "
            f"{p.context} x {p.data} = {product}; set parallel.num_ranks={product}{advice}"
        )
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        yield Violation(
            f"parallel.virtual_pipeline={p.virtual_pipeline} cuts pipeline stages into chunks and needs "
            "parallel.pipeline above 1; set parallel.virtual_pipeline=1"
        )
    if config.train.schedule == "forwards_first" and p.pipeline > 1:
        yield Violation(
            f'train.schedule="forwards_first" is not possible with parallel.pipeline={p.pipeline}, whose stages pass '
            'micro-batches on in an order of their own; set train.schedule="auto"'
        )
    if config.optimizer.distributed and p.data * p.context == 1 and config.cluster.gpu is None:
        yield warning(
            "optimizer.distributed=true splits Adam's state over parallel.data x context ranks, and there is one; "
            "set optimizer.distributed=false"
        )
    if p.sequence and p.tensor == 1:
        yield Violation(
            "parallel.sequence=true splits within the tensor-parallel group and needs parallel.tensor above 1; "
            "set parallel.sequence=false"
        )


def _gpus(config: Config, num_gpus: int) -> Iterator[Violation]:
    """Count GPUs: each rank and server needs its own, as NCCL refuses a group with two members on one."""
    r, ranks = config.rollout, num_ranks(config)
    on_servers = r.num_server_gpus
    if num_gpus and ranks + on_servers > num_gpus:
        servers = f" and {r.num_servers} {r.engine_kind.title}s x {r.server_tensor_parallel}" if on_servers else ""
        c, needed = config.cluster, ranks + on_servers
        lower = f"lower parallel.*{', rollout.num_servers or rollout.server_tensor_parallel' if on_servers else ''}"
        there = f'{num_gpus} are visible; {lower}, or set CUDA_VISIBLE_DEVICES="" to run on CPUs'
        if c.gpu is not None and num_gpus == c.nodes * c.gpus_per_node:
            there = (
                f"cluster.nodes x gpus_per_node = {c.nodes} x {c.gpus_per_node} = {num_gpus}; "
                f"set cluster.nodes={-(-needed // c.gpus_per_node)} (and submit it with `bapo slurm`), or {lower}"
            )
        yield Violation(f"{ranks} trainer ranks{servers} need {needed} GPUs, and {there}")


def _batch(config: Config) -> Iterator[Violation]:
    r, t, data = config.rollout, config.train, config.parallel.data
    num_sequences = r.prompts_per_step * r.samples_per_prompt
    if num_sequences % t.minibatches_per_step:
        nearest = _nearest_divisor(num_sequences, t.minibatches_per_step)
        yield Violation(
            f"train.minibatches_per_step={t.minibatches_per_step} does not divide rollout.prompts_per_step x "
            f"samples_per_prompt = {r.prompts_per_step} x {r.samples_per_prompt} = {num_sequences} sequences; "
            f"set train.minibatches_per_step={nearest}"
        )
    elif (each := num_sequences // t.minibatches_per_step) < data:
        at_most = num_sequences // data
        advice = (
            f"set train.minibatches_per_step={_nearest_divisor(num_sequences, at_most, at_most)}"
            if at_most
            else f"set parallel.data={num_sequences}"
        )
        yield Violation(
            f"each mini-batch has {num_sequences} / {t.minibatches_per_step} = {each} sequences, "
            f"fewer than parallel.data={data} ranks; {advice}"
        )
    if r.samples_per_prompt < 2 and config.advantage.compares_responses:
        yield Violation(
            f"rollout.samples_per_prompt={r.samples_per_prompt}: an advantage compares the responses to one prompt "
            'and needs at least 2; set rollout.samples_per_prompt=8, or advantage.kind="gae", which has a critic'
        )
    own_age = t.minibatches_per_step * t.epochs_per_step - 1
    if r.max_staleness is not None and r.max_staleness < own_age:
        yield Violation(
            f"rollout.max_staleness={r.max_staleness}, but the {own_age + 1} updates of one step already age its "
            f"samples by up to {own_age}; set rollout.max_staleness={own_age} or more"
        )
    needed = 2 * own_age + 1
    if r.overlap and (r.max_staleness is None or own_age <= r.max_staleness < needed):
        yield Violation(
            f"rollout.overlap=true trains samples that are at least one step old, so it needs a bound of at least "
            f"2 x {own_age + 1} - 1 = {needed} updates: set rollout.max_staleness={needed} or more, such as "
            f"{needed + own_age + 1}"
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
            "rollout.overlap=true, but trainer and engines share the cores of this machine, which each of them keeps "
            "busy by turns: steps take a little longer (docs/performance.md); set rollout.overlap=false, unless you "
            "try out a run whose engines will have devices of their own"
        )


def _rollout(config: Config) -> Iterator[Violation]:
    r = config.rollout
    if r.tokens_per_round is not None and r.tokens_per_round > r.max_response_tokens:
        yield Violation(
            f"rollout.tokens_per_round={r.tokens_per_round} is more than rollout.max_response_tokens="
            f"{r.max_response_tokens}; set it below that, or leave it out to sample responses to their end"
        )
    if r.groups_in_flight is not None and r.groups_in_flight < r.prompts_per_step:
        yield Violation(
            f"rollout.groups_in_flight={r.groups_in_flight} is fewer than the rollout.prompts_per_step="
            f"{r.prompts_per_step} groups that a step needs; set rollout.groups_in_flight={r.prompts_per_step} or more"
        )
    if r.abort_tail and not r.overlap and (r.groups_in_flight or r.prompts_per_step) == r.prompts_per_step:
        yield warning(
            f"rollout.abort_tail=true has no tail to abort: rollout.groups_in_flight is the "
            f"{r.prompts_per_step} groups that a step needs; set rollout.groups_in_flight={2 * r.prompts_per_step}"
        )
    longest = config.data.max_prompt_tokens + r.max_response_tokens
    if r.engine_max_context is not None and r.engine_max_context < longest:
        yield Violation(
            f"rollout.engine_max_context={r.engine_max_context} is shorter than data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {config.data.max_prompt_tokens} + {r.max_response_tokens} = {longest}; "
            "set it to that or more, or leave it out"
        )


def _engines(config: Config) -> Iterator[Violation]:
    r = config.rollout
    if r.engine == "attach" and not r.urls:
        yield Violation(
            'rollout.engine="attach" needs rollout.urls, such as rollout.urls=["http://127.0.0.1:30000"]; '
            'or set rollout.engine="embedded"'
        )
    if r.engine == "recorded" and r.recorded_from is None:
        yield Violation(
            'rollout.engine="recorded" needs rollout.recorded_from, the `rollouts` folder of a run with '
            'rollout.record=true; or set rollout.engine="embedded"'
        )
    if r.server_tensor_parallel > 1 and not r.engine_kind.tensor_parallel:
        yield Violation(
            f"rollout.server_tensor_parallel={r.server_tensor_parallel}, but the {r.engine_kind.title} is one process; "
            'set rollout.engine="sglang" or rollout.server_tensor_parallel=1'
        )
    for name in sorted(config.sglang.extra.keys() & OWN_SGLANG_ARGUMENTS.keys()):
        yield Violation(f"sglang.extra.{name} is set by the launcher; use {OWN_SGLANG_ARGUMENTS[name]}")
    if not r.engine_kind.answers_when_busy and r.hang_timeout_s < config.sync.timeout_s:
        yield warning(
            f"rollout.hang_timeout_s={r.hang_timeout_s:g} is below sync.timeout_s={config.sync.timeout_s:g}: a server "
            f"may be killed in the middle of a weight update; set rollout.hang_timeout_s={config.sync.timeout_s:g}"
        )
    if url := r.router_url:
        yield from _router(url, r)
    for url in r.urls if r.engine == "attach" else ():
        if server_address(url) is None:
            yield Violation(f'rollout.urls: "{url}" is not the URL of a server; write it like "http://127.0.0.1:30000"')
    share = config.sglang.extra.get("mem_fraction_static")
    if share is not None and not (type(share) in (int, float) and 0 < share < 1):
        yield Violation(
            f"sglang.extra.mem_fraction_static={share!r} is not a share of a GPU's memory, for weights and KV cache; "
            "set it between 0 and 1, such as 0.85, or leave it out"
        )


def _cut(config: Config) -> Iterator[Violation]:
    """Check that the engine returns the log-probs that top_p and top_k need; warn of the ratios that they lead to."""
    r, kind = config.rollout, config.rollout.engine_kind
    for table, cut in ({"rollout": r} | config.eval_sets).items():
        if not kind.samples or (cut.top_p == 1 and cut.top_k is None):
            continue
        given = f"{table}.top_p={cut.top_p:g}" if cut.top_p < 1 else f"{table}.top_k={cut.top_k}"
        if not kind.cuts:
            yield Violation(
                f"{given}: the {kind.title} does not return log-probs of the distribution that a cut leaves; leave "
                f'{table}.top_p and {table}.top_k out, or set rollout.engine="embedded"'
            )
        elif kind.max_cut_tokens is not None and (cut.top_k is None or cut.top_k > kind.max_cut_tokens):
            yield Violation(
                f"{given}: the {kind.title} returns log-probs of the distribution that a cut leaves only with a top_k "
                f"of at most {kind.max_cut_tokens}; set {table}.top_k, such as {table}.top_k=1024"
            )
    if r.is_cut and isinstance(config.loss, RatioLoss) and not config.loss.scores_proximal:
        yield warning(
            "with rollout.top_p and rollout.top_k, the ratio of a token on policy is the kept mass, below 1: clipping "
            'sees the cut as a change of the policy (docs/bapo.md); set loss.proximal="learner" to clip changes only'
        )


def _router(url: str, r: RolloutConfig) -> Iterator[Violation]:
    if r.engine != "attach":
        yield Violation(
            f'rollout.router_url="{url}" is for servers of your own that the router knows; set rollout.engine="attach" '
            "and their rollout.urls, or leave router_url out"
        )
    if server_address(url) is None:
        yield Violation(f'rollout.router_url="{url}" is not a URL; set it to something like "http://127.0.0.1:30001"')
    if url.rstrip("/") in {worker.rstrip("/") for worker in r.urls}:
        yield Violation(f'rollout.router_url="{url}" is also one of rollout.urls, which are the servers behind it')


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
    if config.data.sources and config.data.path is not None:
        yield Violation(
            f"data.path={config.data.path} names a file besides data.sources; make it one of them, or leave it out"
        )
    for table, one in config.prompt_sources.items():
        yield from _source(table, one)


def _source(table: str, one: SourceConfig) -> Iterator[Violation]:
    """Check one source of prompts, described by `table`: whether it names what it draws from, and nothing else."""
    if one.source == "jsonl" and one.path is None:
        yield Violation(f'{table}.source="jsonl" needs {table}.path, a file with one JSON object a line')
    if one.source == "reasoning_gym" and one.dataset is None:
        yield Violation(
            f'{table}.source="reasoning_gym" needs {table}.dataset, such as {table}.dataset="basic_arithmetic"'
        )
    if table != "data" and one.source != "jsonl" and one.path is not None:
        yield Violation(f'{table}.path={one.path} has no effect with source="{one.source}"; leave one of them out')


def _eval(config: Config) -> Iterator[Violation]:
    if config.eval.interval_steps is None:
        return
    for table, one in config.eval_sets.items() if config.eval.sets else ():
        yield from _source(table, one)
        longest = config.data.max_prompt_tokens + (one.max_response_tokens or 0)
        limit = config.rollout.engine_max_context
        if limit is not None and longest > limit:
            yield Violation(
                f"{table}.max_response_tokens + data.max_prompt_tokens = {one.max_response_tokens} + "
                f"{config.data.max_prompt_tokens} = {longest} is more than rollout.engine_max_context={limit}; set the "
                "latter to that or more, or leave it out"
            )
    if config.data.sources and not config.eval.sets:
        yield Violation(
            "eval.interval_steps with data.sources needs eval.sets, which name the prompts to evaluate on; or leave "
            "eval.interval_steps out"
        )
    elif config.data.source == "jsonl" and config.eval.path is None and not config.eval.sets:
        yield Violation(
            'eval.interval_steps with data.source="jsonl" needs eval.path, a file of prompts to evaluate on; '
            "or leave eval.interval_steps out"
        )
    if not config.rollout.engine_kind.samples:
        yield Violation(
            f'eval.interval_steps needs engines to ask, and rollout.engine="{config.rollout.engine}" has none; leave '
            'it out, or set rollout.engine="embedded"'
        )


def _reward(config: Config) -> Iterator[Violation]:
    """Check the settings of judging and shaping against each other."""
    reward, r = config.reward, config.rollout
    if reward.overlong_buffer_tokens > r.max_response_tokens:
        yield Violation(
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} is more than rollout.max_response_tokens="
            f"{r.max_response_tokens}: even an empty response would be punished; set "
            f"reward.overlong_buffer_tokens={max(1, r.max_response_tokens // 5)}"
        )
    if r.truncated == "mask" and reward.overlong_penalty:
        yield warning(
            'rollout.truncated="mask" keeps truncated responses out of the loss, so that reward.overlong_penalty='
            f'{reward.overlong_penalty:g} teaches little; set rollout.truncated="keep" or reward.overlong_penalty=0'
        )
    if r.keep_group == "informative" and r.samples_per_prompt == 2:
        yield warning(
            'rollout.keep_group="informative" with rollout.samples_per_prompt=2 drops most groups: two responses often '
            'get the same reward; set rollout.samples_per_prompt=8, or rollout.keep_group="all"'
        )
    if r.keep_group == "informative" and config.train.entropy_coef:
        yield warning(
            f"train.entropy_coef={config.train.entropy_coef:g} rewards entropy on groups of equal rewards too, and "
            'rollout.keep_group="informative" leaves these out of the batch; set rollout.keep_group="all"'
        )
    for table, one in config.prompt_sources.items():
        if reward.kind == "code" and one.source != "jsonl":
            yield Violation(
                f'reward.kind="code" needs prompts with tests, but {table}.source={one.source!r} has none; '
                f'set {table}.source="jsonl"'
            )
    is_scaled = reward.scale != 1 or reward.running_std
    if config.advantage.kind == "grpo" and is_scaled and reward.clip is None:
        name = "reward.running_std" if reward.running_std else f"reward.scale={reward.scale:g}"
        yield warning(
            f'{name} does nothing with advantage.kind="grpo", which divides by the standard deviation of each group; '
            'set advantage.kind="dr_grpo" or "rloo"'
        )
    if config.advantage.whiten_batch and is_scaled and reward.clip is None and config.advantage.kind != "grpo":
        yield warning(
            "advantage.whiten_batch=true divides by the standard deviation of the batch, so that reward.scale and "
            "reward.running_std do nothing; leave one of them out"
        )


def _loss(config: Config) -> Iterator[Violation]:
    loss, train = config.loss, config.train
    if loss.scores_proximal and train.minibatches_per_step * train.epochs_per_step == 1:
        yield warning(
            'loss.proximal="learner" clips the ratio to the weights that the step began with, which is 1 in its only '
            "update: nothing is ever clipped; set train.minibatches_per_step=2 or more to let the bounds act"
        )
    if config.loss.bounds == "bapo" and config.bapo.scope == "microbatch":
        yield warning(
            'bapo.scope="microbatch" gives every micro-batch bounds of its own, as the authors\' recipe does: results '
            f"depend on train.max_tokens_per_microbatch={config.train.max_tokens_per_microbatch} and on the number of "
            'data and context ranks; set bapo.scope="exact" for results that do not'
        )


def _kl(config: Config) -> Iterator[Violation]:
    loss = config.loss
    if not loss.kl_coef:
        if loss.kl_target is not None:
            yield Violation(
                f"loss.kl_target={loss.kl_target:g} multiplies loss.kl_coef, which is 0 and would stay so; set "
                "loss.kl_coef=0.1, or leave loss.kl_target out"
            )
        return
    if loss.kl_estimator == "k1":
        yield warning(
            'loss.kl_estimator="k1" has a gradient of 0 on average, on samples of the policy itself: as a term of the '
            'loss it adds noise and holds nothing back; set loss.kl_estimator="k2" or "k3"'
        )


def check_reference(config: Config, reference: dict[str, Any], policy: dict[str, Any]) -> Iterator[Violation]:
    """Check that the model of `loss.reference_path` can be compared with the policy, and split like it.

    Args:
        reference, policy: their config.json.
    """
    p, name = config.parallel, f"loss.reference_path={config.loss.reference_path!r}"
    if (size := reference.get("vocab_size")) != policy.get("vocab_size"):
        yield Violation(
            f"{name} has a vocabulary of {size} tokens, the policy one of {policy.get('vocab_size')}: log-probs of the "
            "same tokens cannot be compared; set it to a model of the policy's family, or leave it out"
        )
    for problem in validate_layout(reference, p.tensor, p.pipeline, p.virtual_pipeline):
        yield Violation(f"{name}: {problem}")


def _schedule(config: Config, given: Collection[str] | None) -> Iterator[Violation]:
    optimizer, num_updates = config.optimizer, planned_updates(config)
    if optimizer.warmup_updates < num_updates:
        return
    if optimizer.schedule == "constant":
        is_given = given is None or "optimizer.warmup_updates" in given  # else this is a short trial of a recipe
        if is_given and optimizer.warmup_updates > num_updates and not config.train.rollout_only:
            yield warning(
                f"optimizer.warmup_updates={optimizer.warmup_updates} is longer than the run of {num_updates} updates, "
                f"which ends at {num_updates / optimizer.warmup_updates:.2g} of optimizer.lr; set "
                f"optimizer.warmup_updates={num_updates // 10} or so"
            )
    else:
        yield Violation(
            f"optimizer.warmup_updates={optimizer.warmup_updates} leaves nothing of the {num_updates} updates for "
            f'optimizer.schedule="{optimizer.schedule}"; set optimizer.warmup_updates={num_updates // 10} or so'
        )


def _critic(config: Config) -> Iterator[Violation]:
    """Find settings of groups that a critic does not need, and a critic that trains for the whole run."""
    advantage, critic, r = config.advantage, config.critic, config.rollout
    if advantage.compares_responses:
        return
    if advantage.whiten_batch:
        yield Violation(
            f'advantage.whiten_batch=true is for one advantage per response, and advantage.kind="{advantage.kind}" has '
            "one per token; set advantage.whiten_tokens instead"
        )
    if critic.warmup_steps >= config.train.num_steps and not config.train.rollout_only:
        yield warning(
            f"critic.warmup_steps={critic.warmup_steps} of train.num_steps={config.train.num_steps} steps train the "
            "critic only: the policy would never change; set train.num_steps above it"
        )
    if r.keep_group == "informative":
        cost = "are all there are" if r.samples_per_prompt == 1 else "teach a critic as much as others"
        yield Violation(
            f'rollout.keep_group="informative" leaves out groups of equal rewards, which {cost} with '
            f'rollout.samples_per_prompt={r.samples_per_prompt} and advantage.kind="{advantage.kind}"; set '
            'rollout.keep_group="all"',
            "error" if r.samples_per_prompt == 1 else "warning",
        )
    if r.truncated == "mask":
        yield warning(
            'rollout.truncated="mask": the critic does not learn from truncated responses either, and so predicts the '
            "rewards of complete responses only"
        )


def _sync(config: Config) -> Iterator[Violation]:
    wait_s, patience_s = config.sync.timeout_s, config.parallel.timeout_s
    if num_ranks(config) > 1 and 4 * wait_s > patience_s:
        yield warning(
            f"sync.timeout_s={wait_s:g}: the other trainer ranks wait at most parallel.timeout_s={patience_s:g} s for "
            "the first one, which may have to wait for a hung engine in several stages of a weight update; set "
            f"sync.timeout_s={patience_s / 4:g} or less, or parallel.timeout_s={4 * wait_s:g}"
        )


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}
"""Modules by the extra that installs them: a sink, or the endpoint of monitor.prometheus_port."""


def check_monitor(config: Config) -> Iterator[Violation]:
    """Find missing packages before anything starts."""
    users: dict[str, tuple[str, str]] = {
        name: (f'monitor.sinks has "{name}"', f'take "{name}" out of it') for name in config.monitor.sinks
    }
    if (port := config.monitor.prometheus_port) is not None:
        users["prometheus"] = (f"monitor.prometheus_port={port}", "leave it out")
    for extra, (setting, instead) in users.items():
        if find_spec(PACKAGES[extra]) is None:
            yield Violation(
                f"{setting}, and the package {PACKAGES[extra].replace('_', '-')} is not installed; "
                f"run `pip install 'bapo-megatron[{extra}]'`, or {instead}"
            )
        elif extra == "wandb" and not _has_wandb_key():
            yield Violation(
                f"{setting}, and there is no key for Weights & Biases; run `wandb login`, set WANDB_API_KEY, set "
                f"WANDB_MODE=offline to send the metrics later, or {instead}"
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
    p = config.parallel
    yield from (Violation(message) for message in validate_layout(hf_config, p.tensor, p.pipeline, p.virtual_pipeline))
    heads, ranks = hf_config.get("num_attention_heads"), config.rollout.server_tensor_parallel
    if isinstance(heads, int) and heads % ranks:
        yield Violation(
            f"rollout.server_tensor_parallel={ranks} does not divide the model's num_attention_heads={heads}; "
            f"set rollout.server_tensor_parallel={_nearest_divisor(heads, ranks)}"
        )
    positions = hf_config.get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if isinstance(positions, int) and prompt + response > positions:
        fitting = positions - response if response < positions else positions // 2
        advice = f"set data.max_prompt_tokens={fitting}"
        if response >= positions:
            advice += f" and rollout.max_response_tokens={positions - fitting}"
        yield Violation(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} = {prompt + response} is "
            f"more than the model's max_position_embeddings={positions}; {advice}"
        )
    elif isinstance(positions, int) and config.longest_sequence > positions:
        yield Violation(
            f"data.max_prompt_tokens + the longest max_response_tokens of eval.sets = {config.longest_sequence} is "
            f"more than the model's max_position_embeddings={positions}; "
            f"set max_response_tokens={positions - prompt} there"
        )
