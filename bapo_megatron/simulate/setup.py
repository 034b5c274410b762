"""From a run, its plan and the settings of a simulation to its `World`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bapo_megatron.errors import ConfigError, plural
from bapo_megatron.hf.streams import routes
from bapo_megatron.machine.gpus import GPU
from bapo_megatron.machine.parameters import active_parameters
from bapo_megatron.machine.server_memory import ServerMemory
from bapo_megatron.preflight import work
from bapo_megatron.preflight.plan import COMPUTE_SHARE, LINK_SHARE, RunPlan
from bapo_megatron.resolved import Resolved
from bapo_megatron.rollout.recorded import read_groups, recorded_steps
from bapo_megatron.simulate.settings import Simulation
from bapo_megatron.simulate.world import (
    RANK_ZERO_US,
    REPLY_US,
    ROUTE_US,
    Curve,
    LogNormal,
    Recorded,
    World,
    standard_normal,
)

_MOST_RESPONSES = 50_000  # in a simulation without `slices`: about half a minute
_UNITS = 24  # simulated tokens of a response of mean length, at least


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a run that is simulated."""

    world: World
    num_slices: int
    num_gpus: int  # in the whole run
    mean_tokens: int  # in a response


def make_slice(run: Resolved, plan: RunPlan, settings: Simulation, recorded: Recorded | None) -> Slice:
    """Return the world to simulate.

    Args:
        recorded: lengths whose mean the plan has; None for random ones.

    Raises:
        ConfigError: there are no servers to simulate, or the settings do not fit the run.
    """
    config, r, memory = run.config, run.config.rollout, plan.server
    if memory is None or plan.rollout is None or r.num_servers != run.placement.num_servers:
        raise ConfigError('--simulate needs servers on the GPUs of [cluster]: set rollout.engine="sglang"')
    num_slices = _num_slices(run, settings)
    num_servers = r.num_servers // num_slices
    if wrong := [number for number, _, _ in settings.down if number >= num_servers]:
        has = "the run has" if num_slices == 1 else "a slice has"
        raise ConfigError(f"--simulate down names server {wrong[0]}, and {has} {plural(num_servers, 'server')}, from 0")
    for (number, at_s, for_s), (other, next_s, _) in pairwise(sorted(settings.down)):
        if number == other and next_s < at_s + for_s:
            raise ConfigError(
                f"--simulate down: server {number} cannot end at {next_s:g} s, because it is down until "
                f"{at_s + for_s:g} s; make it one entry"
            )
    mean = plan.tokens.response
    lengths = recorded or LogNormal.with_mean(mean, settings.spread, r.max_response_tokens, settings.seed)
    prompt = config.data.max_prompt_tokens
    has_turns = settings.turns > 1
    if settings.turns > mean:
        raise ConfigError(
            f"--simulate turns={settings.turns} needs a token in each turn, and a response has {mean} on average; set "
            f"it to {mean} or less"
        )
    longest = prompt + r.max_response_tokens + (settings.turns - 1) * settings.answer_tokens
    if has_turns and longest > (positions := run.shape.max_positions):
        raise ConfigError(
            f"prompt and response of {prompt + r.max_response_tokens} tokens with {settings.turns} - 1 answers of "
            f"--simulate answer_tokens={settings.answer_tokens} make {longest}, more than the model's "
            f"max_position_embeddings={positions}; set turns or answer_tokens lower"
        )
    num_sequences = plan.tokens.num_sequences / num_slices

    def train_seconds(num_sampled: int) -> float:
        if settings.train_s is not None:
            return settings.train_s * num_sampled / (num_sequences * mean)
        share = (num_sampled + num_sequences * plan.tokens.prompt) / (num_sequences * plan.tokens.per_sequence)
        return plan.train.expected * share

    def wait_seconds(name: str) -> float:
        drawn = settings.wait_spread * standard_normal(settings.seed, "wait", name) - settings.wait_spread**2 / 2
        return settings.wait_s * math.exp(drawn) if settings.wait_s else 0.0

    groups = r.groups_in_flight
    part = {
        "num_servers": num_servers,
        "prompts_per_step": r.prompts_per_step // num_slices,
        "groups_in_flight": None if groups is None else -(-groups // num_slices),
        "request_timeout_s": 1e6,
    }
    most = r.max_concurrent_requests
    if memory.state_bytes:
        most = min(most, memory.concurrency)
    world = World(
        rollout=r.model_copy(update=part),
        num_servers=num_servers,
        step_s=_step_seconds(run, plan.gpu, memory, settings),
        lengths=lengths,
        train_s=train_seconds,
        push_s=plan.sync.expected if settings.push_s is None else settings.push_s,
        updates_per_step=config.train.minibatches_per_step * config.train.epochs_per_step,
        unit=_unit(mean / settings.turns, r.tokens_per_round, settings.answer_tokens if has_turns else None),
        prompt_tokens=prompt,
        max_running=most,
        cache_tokens=memory.kv_tokens,
        prefill_s=_prefill_seconds(run, plan.gpu, settings),
        num_turns=settings.turns,
        answer_tokens=settings.answer_tokens,
        wait_s=wait_seconds,
        kept_share=settings.kept_share,
        token_us={name: us * num_slices for name, us in _token_us(run, settings).items()},
        reply_us={name: us * num_slices for name, us in REPLY_US.items()},
        shares_gpus=plan.shared is not None,
        ends_requests=config.model.replay_routes and r.overlap,
        moves_s=plan.moves_s,
        down=settings.down,
        return_limit_s=run.engine.startup_limit_s(r.startup_timeout_s),
        seed=settings.seed,
    )
    return Slice(world, num_slices, run.placement.num_gpus, mean)


def recorded_lengths(settings: Simulation, most: int) -> Recorded | None:
    """Return the lengths in `lengths_from`, whichever steps it holds; None without it.

    Raises:
        ConfigError: there are none.
        DataError: they cannot be read, or exceed `most`, rollout.max_response_tokens.
    """
    if settings.lengths_from is None:
        return None
    folder = Path(settings.lengths_from).expanduser()
    steps = recorded_steps(folder)
    if not steps:
        raise ConfigError(
            f"--simulate lengths_from: {folder} holds no step-*.jsonl.gz; give the `rollouts` folder of a run with "
            "rollout.record=true"
        )
    groups = [group for step in steps for group in read_groups(folder, step, (), most)]
    return Recorded([[sample.num_sampled_tokens for sample in group.samples] for group in groups], settings.seed)


def _num_slices(run: Resolved, settings: Simulation) -> int:
    r = run.config.rollout
    common = math.gcd(r.num_servers, r.prompts_per_step)
    num_responses = r.prompts_per_step * r.samples_per_prompt * (settings.steps + settings.warmup_steps)
    if settings.slices is None:
        if settings.down:
            return 1  # which servers fail matters
        fitting = (k for k in range(1, common + 1) if common % k == 0 and num_responses / k <= _MOST_RESPONSES)
        return next(fitting, common)
    if common % settings.slices:
        raise ConfigError(
            f"--simulate slices={settings.slices} does not divide rollout.num_servers={r.num_servers} and "
            f"rollout.prompts_per_step={r.prompts_per_step}; set it to a divisor of {common}"
        )
    return settings.slices


def _step_seconds(run: Resolved, gpu: GPU, memory: ServerMemory, settings: Simulation) -> Callable[[int, float], float]:
    if settings.decode_ms:
        return Curve(sorted((num, ms / 1000) for num, ms in settings.decode_ms))
    messages_s, bound = work.decode_step_messages_seconds(run), work.decode_step(run, gpu, memory)
    return lambda num, context: bound(num, context) / LINK_SHARE + messages_s


def _prefill_seconds(run: Resolved, gpu: GPU, settings: Simulation) -> float:
    """Return the seconds of a token's prefill on a server: matrix products alone."""
    if settings.prefill_us is not None:
        return settings.prefill_us * 1e-6
    flops = 2 * active_parameters(run.shape) / run.config.rollout.server_tensor_parallel
    return flops / gpu.flops(run.config.model.dtype) / COMPUTE_SHARE


def _token_us(run: Resolved, settings: Simulation) -> dict[str, float]:
    """Return rank 0's microseconds for each token, by part."""
    if settings.reply_us is not None:
        return {"replies": settings.reply_us}
    found = dict(RANK_ZERO_US)
    if run.config.model.replay_routes:
        found |= {name: us * math.prod(routes(run.shape).shape) for name, us in ROUTE_US.items()}
    return found


def _unit(mean: float, piece: int | None, answer: int | None) -> int:
    """Return how many tokens one simulated token stands for: few enough that rounding does not matter."""
    limits = [mean / _UNITS, *([] if piece is None else [piece / 8]), *([] if answer is None else [answer])]
    return max(1, 2 ** int(math.log2(max(1.0, min(limits)))))
