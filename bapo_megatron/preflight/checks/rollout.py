"""Checks of sampling, and of the servers that sample."""

import math
from collections.abc import Iterator
from urllib.parse import urlsplit

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.sglang import OWN_ARGUMENTS
from bapo_megatron.errors import plural
from bapo_megatron.resolved import Resolved


def check_rollout(config: Config) -> Iterator[Violation]:
    """Check the lengths and numbers of responses and groups against each other."""
    r = config.rollout
    if r.tokens_per_round is not None and r.tokens_per_round > r.max_response_tokens:
        yield Violation(
            ("rollout.tokens_per_round", "rollout.max_response_tokens"),
            f"rollout.tokens_per_round={r.tokens_per_round} is more than rollout.max_response_tokens="
            f"{r.max_response_tokens}",
            "set it below that, or leave it out to sample responses to their end",
        )
    if r.max_response_tokens == 1:
        yield warning(
            ("rollout.max_response_tokens",),
            "rollout.max_response_tokens=1 cuts every response after its first token",
            "set it to the longest answer that you expect, such as rollout.max_response_tokens=512",
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
    elif r.abort_tail and r.max_staleness is None:
        updates_per_step = config.train.minibatches_per_step * config.train.epochs_per_step
        yield warning(
            ("rollout.abort_tail", "rollout.max_staleness"),
            "rollout.abort_tail=true continues the longest responses over any number of updates, because "
            "rollout.max_staleness is not set",
            f"set a bound in updates, such as rollout.max_staleness={4 * updates_per_step}, four steps (docs/scale.md)",
        )


def check_shared_cores(run: Resolved, num_gpus: int) -> Iterator[Violation]:
    """Warn of sampling and training at the same time on the same cores."""
    has_gpus = run.engine.on_gpus or num_gpus or run.config.cluster.gpu is not None
    if run.config.rollout.overlap and run.placement.num_servers and not has_gpus:
        yield warning(
            ("rollout.overlap", "rollout.engine", "cluster.gpu"),
            "rollout.overlap=true, but trainer and engines share the cores of this machine and already keep them "
            "busy in turns: overlapping makes steps slightly slower (docs/performance.md)",
            "set rollout.overlap=false, unless you are trying out a run whose engines will have their own devices",
        )


def check_servers(run: Resolved) -> Iterator[Violation]:
    """Check what the engine needs, and the settings that are passed on to its servers."""
    config, r, kind = run.config, run.config.rollout, run.engine
    if kind.needs == "urls" and not r.urls:
        yield Violation(
            ("rollout.urls", "rollout.engine"),
            f'rollout.engine="{r.engine}" needs rollout.urls',
            'set it, such as rollout.urls=["http://127.0.0.1:30000"], or rollout.engine="embedded"',
        )
    if kind.needs == "recordings" and r.recorded_from is None:
        yield Violation(
            ("rollout.recorded_from", "rollout.engine"),
            f'rollout.engine="{r.engine}" needs rollout.recorded_from, the `rollouts` folder of a run with '
            "rollout.record=true",
            'set it, or rollout.engine="embedded"',
        )
    if r.server_tensor_parallel > 1 and not kind.tensor_parallel:
        yield Violation(
            ("rollout.server_tensor_parallel", "rollout.engine"),
            f"rollout.server_tensor_parallel={r.server_tensor_parallel}, but the {kind.title} is one process",
            'set rollout.engine="sglang" or rollout.server_tensor_parallel=1',
        )
    for name in sorted(config.sglang.extra.keys() & OWN_ARGUMENTS.keys()):
        problem = f"sglang.extra.{name} is set by the launcher"
        yield Violation((f"sglang.extra.{name}",), problem, f"use {OWN_ARGUMENTS[name]}")
    if not kind.answers_when_busy and r.hang_timeout_s < config.sync.timeout_s:
        yield warning(
            ("rollout.hang_timeout_s", "sync.timeout_s", "rollout.engine"),
            f"rollout.hang_timeout_s={r.hang_timeout_s:g} is below sync.timeout_s={config.sync.timeout_s:g}: a server "
            "may be killed in the middle of a weight update",
            f"set rollout.hang_timeout_s={config.sync.timeout_s:g}",
        )
    of_engine = {("rollout.urls", "rollout.engine"): r.urls if kind.needs == "urls" else ()}
    for settings, urls in (of_engine | {(config.teacher.given,): config.teacher.all_urls}).items():
        for url in urls:
            if (address := server_address(url)) is None:
                problem = f'{settings[0]}: "{url}" is not the URL of a server'
                yield Violation(settings, problem, 'write it like "http://127.0.0.1:30000"')
            elif "@" in urlsplit(url).netloc:
                key = f"{settings[0].partition('.')[0]}.api_key"
                problem = f"{settings[0]}: the URL of {address[0]} has a password, which logs and run.dir would show"
                yield Violation(settings, problem, f"leave it out, and set {key} to a file with the server's key")
    same = {url.rstrip("/") for url in r.urls} & {url.rstrip("/") for url in config.teacher.all_urls}
    if same and kind.needs == "urls":
        yield warning(
            (config.teacher.given, "rollout.urls"),
            f"{config.teacher.given}: {min(same)} is a server of the policy, too: it teaches it to stay as it is",
            "set it to servers of a better model",
        )
    share = None if config.shares_gpus else config.sglang.extra.get("mem_fraction_static")  # else check_sharing tells
    if share is not None and share is not False and not (type(share) in (int, float) and 0 < share < 1):
        yield Violation(
            ("sglang.extra.mem_fraction_static",),
            f"sglang.extra.mem_fraction_static={share!r} is not a share of a GPU's memory, for weights and KV cache",
            "set it between 0 and 1, such as 0.85, or leave it out",
        )
    ratio = config.sglang.extra.get("mamba_full_memory_ratio")
    if ratio is not None and not (type(ratio) in (int, float) and 0 < ratio < math.inf):
        yield Violation(
            ("sglang.extra.mamba_full_memory_ratio",),
            f"sglang.extra.mamba_full_memory_ratio={ratio!r} is not memory for states / memory for keys and values",
            "set it above 0, such as 0.9, or leave it out",
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


def check_cut(run: Resolved) -> Iterator[Violation]:
    """Check that the engine returns the log-probs that top_p and top_k need; warn of the resulting ratios."""
    config, r, kind = run.config, run.config.rollout, run.engine
    for table, cut in ({"rollout": r} | config.eval_sets).items():
        if not kind.samples or (cut.top_p == 1 and cut.top_k is None):
            continue
        given = f"{table}.top_p={cut.top_p:g}" if cut.top_p < 1 else f"{table}.top_k={cut.top_k}"
        settings = (f"{table}.top_k", f"{table}.top_p", "rollout.engine")
        if not kind.cuts:
            yield Violation(
                settings,
                f"{given}: the {kind.title} does not return log-probs of the distribution after the cut",
                f'leave {table}.top_p and {table}.top_k out, or set rollout.engine="embedded"',
            )
        elif kind.max_cut_tokens is not None and (cut.top_k is None or cut.top_k > kind.max_cut_tokens):
            yield Violation(
                settings,
                f"{given}: the {kind.title} returns log-probs of the distribution after the cut only with a top_k of "
                f"at most {kind.max_cut_tokens}",
                f"set {table}.top_k, such as {table}.top_k=1024",
            )
    if r.is_cut and config.loss.ratio_options is not None and not config.loss.scores_proximal:
        yield warning(
            ("loss.proximal", "loss.name", "rollout.top_p", "rollout.top_k"),
            "with rollout.top_p and rollout.top_k, the ratio of an on-policy token is the kept mass, below 1: clipping "
            "treats the cut as a change of the policy (docs/bapo.md)",
            'set loss.proximal="learner" to clip only changes',
        )
