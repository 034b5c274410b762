"""Rollout engines by name, and the capabilities on which checks, placement, start and evaluation depend.

The table is data that the configuration can read; an engine's code is in engines/, or in a separate package:

    # my_vllm/__init__.py, for rollout.engine = "my_vllm:KIND"
    KIND = EngineKind("vLLM server", specs="my_vllm.start:engine_specs", on_gpus=True, tensor_parallel=True)

A server reports further capabilities itself, in its `server_info` (engines/base.py, Capability).
"""

from dataclasses import dataclass
from typing import Literal

from bapo_megatron.config.dotted import Seam


@dataclass(frozen=True, slots=True)
class EngineKind:
    """The capabilities of an engine. Its functions are dotted paths, so that reading them imports no engine."""

    title: str  # the name of one server in messages
    specs: str | None = None  # function that describes the servers to start on one machine; None starts nothing
    check: str | None = None  # function that raises UserError if the engine is not installed
    client: str = "bapo_megatron.engines.connected:http_client"  # function that returns the client of one server
    samples: bool = True  # False means that batches come from disk
    on_gpus: bool = False  # if there are GPUs, each server takes its own rollout.server_tensor_parallel of them
    tensor_parallel: bool = False  # a server may split the model over several ranks
    answers_when_busy: bool = True  # also within a forward pass or a weight update
    cuts: bool = False  # samples with top_p and top_k, and returns log-probs of the distribution that remains
    max_cut_tokens: int | None = None  # largest top_k (which must be set) for such log-probs; None means no limit
    needs: Literal["urls", "recordings"] | None = None  # what a setting of [rollout] must give: servers or batches
    section: Literal["sglang"] | None = None  # the table with the settings of the servers that it starts
    startup_timeout_s: float = 180.0  # if rollout.startup_timeout_s is unset

    def startup_limit_s(self, asked_s: float | None) -> float:
        """Return how long a server may take to start, when rollout.startup_timeout_s is `asked_s`."""
        return asked_s or self.startup_timeout_s


ENGINES = {
    "embedded": EngineKind("embedded engine", specs="bapo_megatron.engines.start:embedded_specs", cuts=True),
    "sglang": EngineKind(
        "SGLang server",
        specs="bapo_megatron.engines.sglang:engine_specs",
        check="bapo_megatron.engines.sglang:check_installed",
        on_gpus=True,
        tensor_parallel=True,
        answers_when_busy=False,
        cuts=True,
        max_cut_tokens=4096,  # its --sampling-mask-max-tokens
        section="sglang",
        startup_timeout_s=1800.0,
    ),
    "attach": EngineKind("attached server", tensor_parallel=True, cuts=True, needs="urls"),
    "recorded": EngineKind("recorded rollout", samples=False, tensor_parallel=True, needs="recordings"),
}

ENGINE = Seam(
    "rollout.engine",
    tuple(ENGINES),
    'an EngineKind, such as KIND = EngineKind("vLLM server", specs="my_vllm.start:engine_specs", on_gpus=True)',
)
ENGINE_SPECS = Seam(
    "rollout.engine",
    (),
    "def engine_specs(run: Resolved, logs, ports, here: NodeShare) -> list[EngineSpec]",
    ("run", "logs", "ports", "here"),
)
ENGINE_CHECK = Seam("rollout.engine", (), "def check_installed(has_gpu: bool), which raises UserError", ("has_gpu",))
ENGINE_CLIENT = Seam(
    "rollout.engine",
    (),
    "def client(url, config: RolloutConfig, vocab_size: int, key: str | None) -> Engine",
    ("url", "config", "vocab_size", "key"),
)


def engine_kind(name: str) -> EngineKind:
    """Return the capabilities of a built-in engine, or of the one at a dotted path.

    Raises:
        UserError: there is none at that path.
    """
    if name in ENGINES:
        return ENGINES[name]
    kind = ENGINE.load(name)
    if not isinstance(kind, EngineKind):
        raise ENGINE.error(name, f"it is of type {type(kind).__name__}, not EngineKind")
    return kind


def check_engine(name: str) -> None:
    """Import the functions that a user-defined engine names.

    Raises:
        UserError: the engine or a function is missing, or has the wrong signature.
    """
    kind = engine_kind(name)
    for seam, path in ((ENGINE_SPECS, kind.specs), (ENGINE_CHECK, kind.check), (ENGINE_CLIENT, kind.client)):
        if path is not None and name not in ENGINES:
            seam.load(path)
