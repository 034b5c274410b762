"""Checks that an engine serves the policy before weights are sent, and holds those weights afterwards.

The embedded engine names its weights as the trainer does, with types, shapes and digests: all are compared.
An SGLang server reports the names of its fused weights and has its own checksums: names are compared with the names
sent, shapes with its config.json (if this machine can read it), checksums between servers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_megatron.engines import sglang_names
from bapo_megatron.engines.base import Capabilities, Engine
from bapo_megatron.engines.replies import shortened
from bapo_megatron.engines.wire import DIGEST, TensorSpec
from bapo_megatron.errors import CheckpointError, EngineError, plural
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.shape import hf_tensors

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


async def check_model(engine: Engine, manifest: Sequence[TensorSpec]) -> dict[str, Any]:
    """Compare the engine's model with the manifest; return its `server_info`.

    Raises:
        EngineError: it is not reachable, not such a server, or serves another model; names the URL and the difference.
    """
    info = await engine.server_info()
    if info.get("weight_version") is None:
        raise EngineError(
            f"{engine.url} answers, but not as SGLang or the embedded engine do (no weight_version at /model_info); "
            "is the URL right?"
        )
    if "weight_manifest" in Capabilities.of(info).extras:
        _check_specs(engine.url, manifest, await engine.transport.manifest())
    else:
        _check_started_with(engine.url, manifest, info)
        _check_names(engine.url, [spec.name for spec in manifest], await engine.transport.digests())
    return info


def check_weights(
    url: str, version: int, digests: Mapping[str, str], info: Mapping[str, Any], checksum: Mapping[str, Any]
) -> None:
    """Compare one engine's version and checksum with the ones sent. Raises EngineError naming a difference."""
    if str(info.get("weight_version")) != str(version):
        raise EngineError(
            f"{url} reports weight version {shortened(info.get('weight_version'))} after {version} was sent"
        )

    if checksum.get("algorithm") != DIGEST:
        _check_names(url, list(digests), checksum)
        return
    held = checksum["ranks"][0]["checksums"]
    wrong = sorted(name for name in digests.keys() | held.keys() if digests.get(name) != held.get(name))
    if wrong:
        raise EngineError(
            f"{url} holds other weights than were sent: {plural(len(wrong), 'difference')}, such as {wrong[0]!r}"
        )


def minority(checksums: Mapping[str, Mapping[str, Any]]) -> dict[str, EngineError]:
    """Return the failures, by URL, of servers whose own checksums differ from most of their kind.

    Servers with equal sharding are compared. Without a majority, all of them fail.
    """
    wrong: dict[str, EngineError] = {}
    kinds: dict[int, dict[str, str]] = {}
    for url, checksum in checksums.items():
        if checksum.get("algorithm") != DIGEST:
            kinds.setdefault(len(checksum.get("ranks", ())), {})[url] = str(checksum.get("per_engine_checksum"))
    for of_url in kinds.values():
        (most, count), *others = Counter(of_url.values()).most_common()
        is_tie = bool(others) and others[0][1] == count
        for url, whole in of_url.items():
            if others and (is_tie or whole != most):
                wrong[url] = EngineError(f"{url} holds other weights than the other servers after the same push")
    return wrong


def _check_specs(url: str, manifest: Sequence[TensorSpec], weights: Sequence[TensorSpec]) -> None:
    """Raise an EngineError with the first difference between the weights sent and held."""
    sent, held = ({spec.name: spec for spec in specs} for specs in (manifest, weights))
    if _EMBEDDING in sent and _EMBEDDING in held:
        size, expected = held[_EMBEDDING].shape[0], sent[_EMBEDDING].shape[0]
        if size != expected:
            raise EngineError(f"{url} serves another model: its vocabulary has {size} tokens, the policy's {expected}")
    for name in (*sent, *held):
        found, wanted = (specs.get(name, f"no weight {name!r}") for specs in (held, sent))
        if found != wanted:
            raise EngineError(f"{url} serves another model: it has {found}, the policy has {wanted}")


def _check_started_with(url: str, manifest: Sequence[TensorSpec], info: Mapping[str, Any]) -> None:
    """Check an SGLang server's arguments, and its model's config.json if this machine can read it."""
    dtype, sent = info.get("dtype"), manifest[0].dtype
    if dtype not in (None, "auto", sent):
        raise EngineError(f"{url} computes in {dtype}, the policy is sent in {sent}: start it with --dtype {sent}")
    try:
        shapes = hf_tensors(ModelFacts.of(str(info.get("model_path"))).shape)
    except CheckpointError:
        return  # on another machine, or of a family that only SGLang knows: only names are compared
    _check_specs(url, manifest, [TensorSpec(name, sent, shape) for name, shape in shapes.items()])


def _check_names(url: str, sent: Sequence[str], checksum: Mapping[str, Any]) -> None:
    """Compare the names sent with an SGLang server's names. SGLang skips weights that its model does not have.

    Raises:
        EngineError: the server lacks a weight that is sent, or has one that is not.
    """
    reported = (sglang_names.held(name) for rank in checksum.get("ranks", ()) for name in rank["checksums"])
    found = {name for name in reported if name is not None}
    wanted = {sglang_names.common(name, found): name for name in sent}
    if _OUTPUT not in wanted:  # the embedding's values, which SGLang ties in most families
        found.discard(_OUTPUT)
        for of_rank in (rank["checksums"] for rank in checksum.get("ranks", ())):
            if {_EMBEDDING, _OUTPUT} <= of_rank.keys() and of_rank[_EMBEDDING] != of_rank[_OUTPUT]:
                raise EngineError(
                    f"{url} serves another model: its {_OUTPUT} is not the embedding, as the policy's is: SGLang does "
                    "not tie them in this family; set tie_word_embeddings=false and save both"
                )
    lacking, extra = (wanted[name] for name in wanted.keys() - found), found - wanted.keys()
    for names, fault in ((sorted(lacking), "lacks"), (sorted(extra), "has, unlike the policy,")):
        if names:
            raise EngineError(
                f"{url} serves another model: it {fault} {plural(len(names), 'weight')}, such as {names[0]!r}"
            )
