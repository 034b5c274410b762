"""Checks across sections: layout, batch arithmetic, model limits. Numbers and a working alternative in each message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bapo_megatron.config.plan_critic import check_critic
from bapo_megatron.config.plan_learning import check_learning, check_reference
from bapo_megatron.config.plan_monitor import check_monitor
from bapo_megatron.config.plan_servers import check_servers, server_address
from bapo_megatron.config.precision import Machine, check_precision
from bapo_megatron.config.schema import Config, RolloutConfig
from bapo_megatron.config.violation import Violation

__all__ = ["Violation", "check", "max_microbatches", "num_ranks", "summarize"]

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
    machine: Machine | None = None,
) -> list[Violation]:
    """All violations across sections, layout first.

    Args:
        hf_config: the model's config.json; None leaves the model's own limits unchecked.
        reference_config: that of `loss.reference_path`, where a KL term has one.
        num_gpus: GPUs of this machine that a run may use; 0 is a run on CPUs.
        machine: what FP8 asks of it; None leaves that unchecked.
    """
    found = [
        *_layout(config),
        *_gpus(config, num_gpus),
        *_batch(config),
        *_rollout(config),
        *_engines(config),
        *check_servers(config),
        *_data(config),
        *_reward(config),
        *_eval(config),
        *_loss(config),
        *check_learning(config),
        *check_critic(config),
        *_sync(config),
        *check_monitor(config),
        *check_precision(config, hf_config, num_gpus, machine),
    ]
    if hf_config is not None:
        found += _model(config, hf_config)
        if reference_config is not None:
            found += check_reference(config, reference_config, hf_config)
    if config.model.dtype == "bfloat16" and not num_gpus:
        message = 'model.dtype="bfloat16" is several times slower than float32 on a CPU; set model.dtype="float32"'
        found.append(Violation(message, "warning"))
    return found


def num_ranks(config: Config) -> int:
    """Trainer processes: tensor x pipeline x context x data."""
    p = config.parallel
    return p.tensor * p.pipeline * p.context * p.data


def summarize(config: Config) -> str:
    """A few lines saying what a run of this configuration amounts to."""
    p, r, t = config.parallel, config.rollout, config.train
    num_sequences = r.prompts_per_step * r.samples_per_prompt
    num_updates = t.minibatches_per_step * t.epochs_per_step
    partial = f"{r.tokens_per_round} tokens a round" if r.tokens_per_round else "off"
    engines = f"{len(r.urls)} attached" if r.engine == "attach" else f"{r.num_servers} {r.engine}"
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
            f"rollout    {engines} engines, {r.groups_in_flight or r.prompts_per_step} groups in flight, "
            f"partial rollout {partial}",
        ]
    )


def max_microbatches(config: Config) -> int:
    """Micro-batches of one update on one data rank if every prompt and response is as long as allowed."""
    per_rank = -(-_sequences_per_minibatch(config) // config.parallel.data)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    budget = config.train.max_tokens_per_microbatch * config.parallel.context
    per_microbatch = max(1, budget // longest)
    return -(-per_rank // per_microbatch)


def _sequences_per_minibatch(config: Config) -> int:
    r = config.rollout
    return r.prompts_per_step * r.samples_per_prompt // config.train.minibatches_per_step


def _layout(config: Config) -> Iterator[Violation]:
    p, product = config.parallel, num_ranks(config)
    if p.num_ranks is not None and p.num_ranks != product:
        yield Violation(
            f"parallel.num_ranks={p.num_ranks}, but tensor x pipeline x context x data = "
            f"{p.tensor} x {p.pipeline} x {p.context} x {p.data} = {product}; {_rank_advice(config)}"
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
        yield Violation(
            "optimizer.distributed=true splits Adam's state over parallel.data x context ranks, and there is one; "
            "set optimizer.distributed=false",
            "warning",
        )
    if p.sequence and p.tensor == 1:
        yield Violation(
            "parallel.sequence=true splits within the tensor-parallel group and needs parallel.tensor above 1; "
            "set parallel.sequence=false"
        )


def _rank_advice(config: Config) -> str:
    p = config.parallel
    assert p.num_ranks is not None
    model_ranks = p.tensor * p.pipeline * p.context
    if p.num_ranks % model_ranks == 0:
        return f"set parallel.data={p.num_ranks // model_ranks} or parallel.num_ranks={num_ranks(config)}"
    return f"set parallel.num_ranks={num_ranks(config)}, or leave it out"


def _gpus(config: Config, num_gpus: int) -> Iterator[Violation]:
    """Ranks and SGLang servers each have GPUs of their own: NCCL refuses a group with two members on one."""
    r, ranks = config.rollout, num_ranks(config)
    on_servers = r.num_servers * r.server_tensor_parallel if r.engine == "sglang" else 0
    if num_gpus and ranks + on_servers > num_gpus:
        servers = f" and {r.num_servers} SGLang servers x {r.server_tensor_parallel}" if on_servers else ""
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
    elif num_sequences // t.minibatches_per_step < data:
        each = num_sequences // t.minibatches_per_step
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
    divisors = [n for n in range(1, (at_most or number) + 1) if number % n == 0]
    return min(divisors, key=lambda n: (abs(n - wanted), n))


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
        yield Violation(
            f"rollout.abort_tail=true has no tail to abort: rollout.groups_in_flight is the "
            f"{r.prompts_per_step} groups that a step needs; set rollout.groups_in_flight={2 * r.prompts_per_step}",
            "warning",
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
    if r.engine == "embedded" and r.server_tensor_parallel > 1:
        yield Violation(
            f"rollout.server_tensor_parallel={r.server_tensor_parallel}, but the embedded engine is one process; "
            'set rollout.engine="sglang" or rollout.server_tensor_parallel=1'
        )
    for name in sorted(config.sglang.extra.keys() & OWN_SGLANG_ARGUMENTS.keys()):
        yield Violation(f"sglang.extra.{name} is set by the launcher; use {OWN_SGLANG_ARGUMENTS[name]}")
    if r.engine == "sglang" and r.hang_timeout_s < config.sync.timeout_s:
        message = (
            f"rollout.hang_timeout_s={r.hang_timeout_s:g} is below sync.timeout_s={config.sync.timeout_s:g}: a server "
            f"may be killed in the middle of a weight update; set rollout.hang_timeout_s={config.sync.timeout_s:g}"
        )
        yield Violation(message, "warning")
    if r.router_url is not None:
        yield from _router(r.router_url, r)


def _router(url: str, r: RolloutConfig) -> Iterator[Violation]:
    if r.engine != "attach":
        yield Violation(
            f'rollout.router_url="{url}" is for servers of your own that the router knows; set rollout.engine="attach" '
            "and their rollout.urls, or leave router_url out"
        )
    if server_address(url) is None:
        yield Violation(f'rollout.router_url="{url}" is no URL; set it to something like "http://127.0.0.1:30001"')
    if url.rstrip("/") in {worker.rstrip("/") for worker in r.urls}:
        yield Violation(f'rollout.router_url="{url}" is also one of rollout.urls, which are the servers behind it')


def _data(config: Config) -> Iterator[Violation]:
    data = config.data
    if data.source == "jsonl" and data.path is None:
        yield Violation('data.source="jsonl" needs data.path, a file with one JSON object a line')
    if data.source == "reasoning_gym" and data.dataset is None:
        yield Violation('data.source="reasoning_gym" needs data.dataset, such as data.dataset="basic_arithmetic"')


def _eval(config: Config) -> Iterator[Violation]:
    if config.eval.interval_steps is None:
        return
    if config.data.source == "jsonl" and config.eval.path is None:
        yield Violation(
            'eval.interval_steps with data.source="jsonl" needs eval.path, a file of prompts to evaluate on; '
            "or leave eval.interval_steps out"
        )
    if config.rollout.engine == "recorded":
        yield Violation(
            'eval.interval_steps needs engines to ask, and rollout.engine="recorded" has none; leave it out, or set '
            'rollout.engine="embedded"'
        )


def _reward(config: Config) -> Iterator[Violation]:
    """What the settings of judging and shaping say about each other."""
    reward, r = config.reward, config.rollout
    if reward.overlong_buffer_tokens > r.max_response_tokens:
        yield Violation(
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} is more than rollout.max_response_tokens="
            f"{r.max_response_tokens}: even an empty response would be punished; set "
            f"reward.overlong_buffer_tokens={max(1, r.max_response_tokens // 5)}"
        )
    if reward.overlong_buffer_tokens and not reward.overlong_penalty:
        yield Violation(
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} does nothing without a penalty; "
            "set reward.overlong_penalty=1, or leave it out",
            "warning",
        )
    if r.truncated == "mask" and reward.overlong_penalty:
        yield Violation(
            'rollout.truncated="mask" keeps truncated responses out of the loss, so that reward.overlong_penalty='
            f'{reward.overlong_penalty:g} teaches little; set rollout.truncated="keep" or reward.overlong_penalty=0',
            "warning",
        )
    if r.zero_variance == "drop" and r.samples_per_prompt == 2:
        yield Violation(
            'rollout.zero_variance="drop" with rollout.samples_per_prompt=2 drops most groups: two responses often get '
            'the same reward; set rollout.samples_per_prompt=8, or rollout.zero_variance="keep"',
            "warning",
        )
    if r.zero_variance == "drop" and config.train.entropy_coef:
        yield Violation(
            f"train.entropy_coef={config.train.entropy_coef:g} rewards entropy on groups of equal rewards too, and "
            'rollout.zero_variance="drop" leaves these out of the batch; set rollout.zero_variance="keep"',
            "warning",
        )
    if reward.kind == "code" and config.data.source != "jsonl":
        yield Violation(
            f'reward.kind="code" needs prompts with tests, but data.source={config.data.source!r} has none; '
            'set data.source="jsonl"'
        )


def _loss(config: Config) -> Iterator[Violation]:
    loss, train = config.loss, config.train
    if loss.proximal == "learner" and train.minibatches_per_step * train.epochs_per_step == 1:
        yield Violation(
            'loss.proximal="learner" clips the ratio to the weights that the step began with, which is 1 in its only '
            "update: nothing is ever clipped; set train.minibatches_per_step=2 or more to let the bounds act",
            "warning",
        )
    if loss.name == "clip_higher" and loss.clip_higher <= loss.clip_high:
        yield Violation(
            f"loss.clip_higher={loss.clip_higher:g} should be above loss.clip_high={loss.clip_high:g}; "
            f'set loss.clip_higher={loss.clip_high + 0.08:g} or loss.name="grpo"'
        )


def _sync(config: Config) -> Iterator[Violation]:
    wait_s, patience_s = config.sync.timeout_s, config.parallel.timeout_s
    if num_ranks(config) > 1 and 4 * wait_s > patience_s:
        yield Violation(
            f"sync.timeout_s={wait_s:g}: the other trainer ranks wait at most parallel.timeout_s={patience_s:g} s for "
            "the first one, which may have to wait for a hung engine in several stages of a weight update; set "
            f"sync.timeout_s={patience_s / 4:g} or less, or parallel.timeout_s={4 * wait_s:g}",
            "warning",
        )


def _model(config: Config, hf_config: dict[str, Any]) -> Iterator[Violation]:
    from bapo_megatron.learner.hf.shapes import validate_layout

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
