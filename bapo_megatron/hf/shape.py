"""The shape of a model, read from config.json: one description for the learner, the embedded engine and the estimates.

Imports neither torch nor transformers until `rotary_frequencies` is called, so that `bapo check` answers immediately.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import CheckpointError, plural
from bapo_megatron.hf.adapters import Adapters, frozen, with_adapters
from bapo_megatron.hf.families import (
    ACTIVATIONS,
    EMBEDDING,
    FAMILIES,
    LACKING,
    OUTSIDE,
    ROPE_TYPES,
    VALUE_HEAD,
    Block,
    Family,
    Parameter,
)
from bapo_megatron.hf.families.settings import LOST, Settings, is_positive, linear_layers, with_text_settings
from bapo_megatron.hf.splits import EachExpert, Entry, is_kept, is_stored

if TYPE_CHECKING:
    from torch import Tensor

_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_MOST, _MOST_LAYERS = 1 << 24, 1 << 14  # sizes far beyond any model's, within which every check answers quickly
_OPTIONAL = ("num_key_value_heads", "head_dim")  # null means the number of heads, and the share of each head
_REQUIRED_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_REQUIRED_OF_LINEAR = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_STRUCTURES: dict[str, tuple[type, str]] = {
    "layer_types": (list, "a list"),
    "rope_parameters": (dict, "an object"),
    "rope_scaling": (dict, "an object"),
}
_NEWER = ("output_gate", "attention_scale", "residual_scale", "logits_scale")  # older checkpoints lack them
_SHARED_EXPERT = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated MLP that every token passes."""

    ffn_size: int

    @property
    def active_rows(self) -> int:
        """Feed-forward rows that one token is multiplied with."""
        return self.ffn_size

    def weights_of_token(self, hidden_size: int) -> int:
        """Count the weights that one token is multiplied with."""
        return 3 * hidden_size * self.active_rows


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs of which a router chooses some for each token, and shared ones that every token passes."""

    num_experts: int
    num_chosen: int  # per token
    ffn_size: int  # size of one expert
    normalised: bool  # whether the weights of the chosen experts are scaled to a sum of 1
    shared_ffn_size: int = 0  # size of all shared experts together

    @property
    def active_rows(self) -> int:
        """Feed-forward rows that one token is multiplied with."""
        return self.num_chosen * self.ffn_size + self.shared_ffn_size

    def weights_of_token(self, hidden_size: int) -> int:
        """Count the weights that one token is multiplied with: the router's and its experts'."""
        return hidden_size * (self.num_experts + 3 * self.active_rows)


RULE_CHUNK = 64  # tokens that the chunked delta rule takes as one step


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Sizes of a Gated DeltaNet, which keeps one matrix per value head instead of the keys and values of all tokens."""

    num_key_heads: int
    num_value_heads: int  # consecutive ones share a key head
    key_dim: int  # for each head
    value_dim: int  # for each head
    conv_width: int  # tokens that the convolution of queries, keys and values reads, each token's own included

    @property
    def keys(self) -> int:
        """Dimensions of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Dimensions of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_bytes(self, item: int) -> int:
        """Return what an engine keeps for a sequence, whatever its length: the state in float32, and the inputs of the
        convolution.

        Args:
            item: bytes of a value of the model's type.
        """
        state = self.num_value_heads * self.key_dim * self.value_dim
        return 4 * state + item * self.conv_channels * (self.conv_width - 1)

    def products_of_token(self, hidden_size: int) -> int:
        """Count the products of one token: projections, convolution, and the rule in chunks of `RULE_CHUNK` tokens."""
        projections = hidden_size * (self.conv_channels + 2 * self.values + 2 * self.num_value_heads)
        rule = 3 * self.key_dim * self.value_dim + RULE_CHUNK * (3 * self.key_dim + 2 * self.value_dim)
        return projections + self.conv_channels * self.conv_width + self.num_value_heads * rule


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What may differ from layer to layer."""

    mlp: Dense | Experts
    block: Block  # of hf/families, or of the user's own family
    linear: LinearAttention | None = None  # None means attention to all earlier tokens
    rotated: bool = True  # queries and keys


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder: its sizes, and the features that decide its computation."""

    family: str  # model_type of config.json
    layers: tuple[LayerShape, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_plus_one: bool  # norms multiply by 1 + weight
    activation: str  # activation of the gated MLP, one of ACTIVATIONS
    embedding_scale: float
    max_positions: int
    rope: dict[str, Any]  # rope_type, rope_theta and the factors of that type, as in transformers' rope_parameters
    eos_token_ids: frozenset[int] = field(compare=False)  # sampling stops there; not part of the computation
    has_value_head: bool = False  # a critic: one number per token instead of a language-model head
    output_gate: bool = False  # each query head of full attention comes with a gate of its output
    attention_scale: float | None = None  # of scores; None means 1 / sqrt(head_dim)
    residual_scale: float = 1.0  # of what attention and MLP add
    logits_scale: float = 1.0  # logits are divided by it
    prefix: str = field(default="model.", compare=False)  # see `Family`; the family's name tells two of them apart
    outside: tuple[Parameter, ...] = field(default=OUTSIDE, compare=False)  # see `Family`
    unread: tuple[str, ...] = field(default=(), compare=False)
    adapters: Adapters | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ffn_sizes(self) -> list[int]:
        """Feed-forward sizes that tensor-parallel ranks split, each once: dense MLPs' and shared experts'."""
        mlps = (layer.mlp for layer, _ in runs(self.layers))
        sizes = {mlp.ffn_size if isinstance(mlp, Dense) else mlp.shared_ffn_size for mlp in mlps}
        return sorted(sizes - {0})

    @property
    def experts(self) -> Experts | None:
        """The experts of a mixture, all of whose layers have the same; None for other models."""
        mlp = self.layers[0].mlp if self.layers else None
        return mlp if isinstance(mlp, Experts) and all(layer.mlp == mlp for layer in self.layers) else None

    @property
    def linear(self) -> LinearAttention | None:
        """Linear attention, the same in all layers that have it; None if no layer has."""
        return next((layer.linear for layer in self.layers if layer.linear is not None), None)

    @property
    def unrotated_layers(self) -> list[int]:
        """Numbers of the layers whose queries and keys are not rotated."""
        return [number for number, layer in enumerate(self.layers) if not layer.rotated]

    @property
    def num_full_layers(self) -> int:
        """Layers that keep keys and values of all earlier tokens."""
        return sum(layer.linear is None for layer in self.layers)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated, the first ones."""
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))

    @property
    def embedding_name(self) -> str:
        """Hugging Face's name of the embedding."""
        (name,) = EMBEDDING.tensors
        return self.tensor_name(name)

    def tensor_name(self, name: str) -> str:
        """Return a tensor's name in this model's checkpoint, from its name in a table of parameters."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    @property
    def has_output_layer(self) -> bool:
        """Whether the language-model head has its own weights."""
        return not self.tied_embeddings and not self.has_value_head

    def with_value_head(self) -> ModelShape:
        """Return the critic with this model's body."""
        return dataclasses.replace(self, has_value_head=True, tied_embeddings=False)

    def with_adapters(self, adapters: Adapters) -> ModelShape:
        """Return this model with adapters in its layers, which alone are trained."""
        layers: list[LayerShape] = []
        for layer, count in runs(self.layers):
            layers += [dataclasses.replace(layer, block=with_adapters(layer.block, adapters.targets))] * count
        return dataclasses.replace(self, layers=tuple(layers), outside=frozen(self.outside), adapters=adapters)

    @property
    def passes_of_update(self) -> float:
        """The FLOPs of an update's forward and backward passes, in forward passes.

        The gradients of activations cost one, and the gradients of weights cost the share of them that is trained.
        """
        counted = [(entry, 1) for entry in outside_entries(self)]
        for layer, count in runs(self.layers):
            for entry in layer_entries(self, layer, experts=[0]):
                counted.append((entry, count if entry.expert is None else count * entry.sizes["X"]))
        sizes = [(entry.trained, times * sum(map(math.prod, entry.hf_shapes))) for entry, times in counted]
        return 2 + sum(num for is_trained, num in sizes if is_trained) / sum(num for _, num in sizes)

    def forward_flops(self, num_tokens: int, num_squares: int, num_rows: int) -> tuple[float, float]:
        """Count the FLOPs of (all layers, the output layer) in one pass: two per weight and token, plus causal
        attention, in which a token attends to half of its sequence on average, or the delta rule.

        Args:
            num_squares: sum of the squared lengths of the sequences.
            num_rows: tokens for which logits are computed.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        full, layers = self.hidden_size * ((3 if self.output_gate else 2) * queries + 2 * keys), 0.0
        for layer, count in runs(self.layers):
            attention, squares = (full, queries * num_squares)
            if layer.linear is not None:  # its state has one size, whatever the length
                attention, squares = layer.linear.products_of_token(self.hidden_size), 0
            matrices = attention + layer.mlp.weights_of_token(self.hidden_size)
            layers += count * 2.0 * (matrices * num_tokens + squares)
        return layers, 2.0 * self.vocab_size * self.hidden_size * num_rows

    @property
    def pair_cost(self) -> float:
        """FLOPs of attention between two tokens, divided by the FLOPs of a response token's matrices: n tokens of a
        sequence cost n + pair_cost * n**2."""
        return self.forward_flops(0, 1, 0)[0] / sum(self.forward_flops(1, 0, 1))

    def padded_vocab_size(self, tensor: int) -> int:
        """Round the vocabulary's rows up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor) * tensor

    def to_json(self) -> dict[str, Any]:
        """Return the fields in which two checkpoints must agree for one to load the other."""
        fields = [f for f in dataclasses.fields(self) if f.compare and f.name not in ("layers", "adapters")]
        values = {f.name: getattr(self, f.name) for f in fields}
        agreed = {f.name: values[f.name] for f in fields if f.name not in _NEWER or values[f.name] != f.default}
        if self.unrotated_layers:
            agreed["unrotated_layers"] = self.unrotated_layers
        if self.adapters is not None:
            agreed["adapters"] = dataclasses.asdict(self.adapters) | {"targets": list(self.adapters.targets)}
        if self.linear is not None:
            agreed["linear_layers"] = [number for number, layer in enumerate(self.layers) if layer.linear is not None]
            agreed["linear"] = dataclasses.asdict(self.linear)
        mlps = [dataclasses.asdict(layer.mlp) for layer in self.layers]
        same = mlps[0] if all(mlp == mlps[0] for mlp in mlps) else {"mlps": mlps}
        return agreed | {"num_layers": self.num_layers} | same


def runs(layers: Iterable[LayerShape]) -> list[tuple[LayerShape, int]]:
    """Return the runs of equal layers, each with its length."""
    return [(layer, sum(1 for _ in equal)) for layer, equal in groupby(layers)]


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """Load the config.json of a checkpoint folder. If it has a text_config, see `with_text_settings`.

    Raises:
        CheckpointError: the folder or file is missing, or the file does not hold a JSON object.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a Hugging Face checkpoint: {file} is missing (model.path)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    except (ValueError, RecursionError) as error:  # also for an integer of thousands of digits
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return with_text_settings(config)


def model_shape(hf_config: dict[str, Any], where: str | Path | None = None, *, own: Family | None = None) -> ModelShape:
    """Read the shape from a config.json.

    Args:
        where: the checkpoint's folder, for error messages.
        own: the user's own family (`model.family`), for checkpoints of its model_type; others use `FAMILIES`.

    Raises:
        CheckpointError: the family, or an option of the model, is not supported; lists all reasons.
    """
    if problems := unsupported(hf_config, own):
        raise CheckpointError((f"{Path(where) / 'config.json'}: " if where else "") + "; ".join(problems))
    get = _settings(hf_config, own)
    family = get.family

    def decided(switch: bool | str) -> bool:
        return bool(get(switch)) if isinstance(switch, str) else switch

    def number(key: str | None) -> float:
        return 1.0 if key is None else float(get(key))

    num_heads, eos = get("num_attention_heads"), get("eos_token_id")
    mlp, linear = _mlp(get), _linear(get)
    full = LayerShape(mlp, family.layer)
    other = LayerShape(mlp, family.linear_layer or family.layer, linear)
    unrotated = LayerShape(mlp, family.layer, rotated=False)
    layers = [other if is_linear else full for is_linear in linear_layers(get)]
    scaled = family.scaled_embedding
    return ModelShape(
        family=hf_config["model_type"],
        layers=tuple(layer if rotates else unrotated for layer, rotates in zip(layers, _rotates(get), strict=True)),
        hidden_size=get("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=get("num_key_value_heads") or num_heads,
        head_dim=get("head_dim") or get("hidden_size") // num_heads,
        vocab_size=get("vocab_size"),
        norm_eps=get("rms_norm_eps"),
        tied_embeddings=get("tie_word_embeddings"),
        qkv_bias=decided(family.qkv_bias),
        out_bias=decided(family.out_bias),
        mlp_bias=decided(family.mlp_bias),
        qk_norm=family.qk_norm,
        norm_plus_one=family.norm_plus_one,
        activation=get("hidden_act"),
        embedding_scale=number(scaled) if isinstance(scaled, str) else math.sqrt(get("hidden_size")) if scaled else 1.0,
        max_positions=get("max_position_embeddings"),
        rope=_rope(get),
        eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        output_gate=family.output_gate,
        attention_scale=None if family.attention_scale is None else number(family.attention_scale),
        residual_scale=number(family.residual_scale),
        logits_scale=number(family.logits_scale),
        prefix=family.prefix,
        outside=family.outside,
        unread=family.unread,
    )


def _mlp(get: Settings) -> Dense | Experts:
    if not get.family.has_experts:
        return Dense(get("intermediate_size"))
    chosen, normalised = get("num_experts_per_tok"), bool(get("norm_topk_prob"))
    shared = get(_SHARED_EXPERT) if get.family.has_shared_expert else 0
    return Experts(get("num_experts"), chosen, get("moe_intermediate_size"), normalised, shared)


def _linear(get: Settings) -> LinearAttention | None:
    return LinearAttention(*map(get, _REQUIRED_OF_LINEAR)) if get.family.linear_layer else None


def _rotates(get: Settings) -> list[bool]:
    return [True] * get("num_hidden_layers") if get.family.rotates is None else get.family.rotates(get)


def unsupported(hf_config: dict[str, Any], own: Family | None = None) -> list[str]:
    """Return why this model can be neither trained nor served; empty if it can."""
    if (problem := unknown_family(hf_config, own)) is not None:
        return [problem]
    return list(_unsupported_options(_settings(hf_config, own)))


def unknown_family(hf_config: dict[str, Any], own: Family | None = None) -> str | None:
    """Return the problem with a model whose family is not supported, or None if it is."""
    name = hf_config.get("model_type")
    if isinstance(name, str) and name in _families(own):
        return None
    needed = f", because it needs {LACKING[name]}" if isinstance(name, str) and name in LACKING else ""
    return (
        f"model_type {name!r} is not supported{needed}; the families are {', '.join(sorted(_families(own)))}; "
        "docs/models.md says how to add one"
    )


def family_of(hf_config: dict[str, Any], own: Family | None = None) -> Family | None:
    """Return the family of a config.json, or None if it is not supported."""
    return _families(own).get(str(hf_config.get("model_type")))


def _families(own: Family | None) -> dict[str, Family]:
    return FAMILIES if own is None else FAMILIES | {own.model_type: own}


def _settings(hf_config: dict[str, Any], own: Family | None) -> Settings:
    return Settings(hf_config, _families(own)[hf_config["model_type"]])


def _unsupported_options(get: Settings) -> Iterator[str]:
    text = get("text_config")
    if get.family.prefix != "model." and not isinstance(text, dict):
        yield "config.json has no text_config, which describes the language model"
        return
    if get.family.prefix == "model." and text:
        yield f"text_config is not supported with model_type {get('model_type')!r}, which is a text model itself"
        return
    if lost := get(LOST):
        yield f"{', '.join(lost)} outside text_config would not be read: move it into text_config"
    of_mlp: tuple[str, ...] = _REQUIRED_OF_EXPERTS if get.family.has_experts else ("intermediate_size",)
    of_mlp += (_SHARED_EXPERT,) if get.family.has_shared_expert else ()
    of_linear = _REQUIRED_OF_LINEAR if get.family.linear_layer else ()
    sizes = {key: get(key) for key in (*_REQUIRED, *of_mlp, *of_linear, "max_position_embeddings")}
    needed = get.written.keys() & get.family.not_null
    sizes |= {key: get(key) for key in _OPTIONAL if get(key) is not None or key in needed}
    if bad := [key for key, value in sizes.items() if type(value) is not int or value < 1]:
        yield "; ".join(
            f"{key}={_quoted(get(key))} is not a positive whole number"
            if key in get.written
            else f"config.json has no {key!r}"
            for key in bad
        )
        return
    most = dict.fromkeys(sizes, _MOST) | {"num_hidden_layers": _MOST_LAYERS}
    if large := [key for key, value in sizes.items() if value > most[key]]:
        yield "; ".join(f"config.json has {key}={sizes[key]}, but at most {most[key]} is supported" for key in large)
        return
    found = [(key, get(key), *wanted) for key, wanted in _STRUCTURES.items() if get(key) is not None]
    if wrong := [f"{key}={value!r} is not {what}" for key, value, kind, what in found if not isinstance(value, kind)]:
        yield "; ".join(wrong)
        return
    if not is_positive(eps := get("rms_norm_eps")):
        yield f"rms_norm_eps={json.dumps(eps)} is not a positive number"
    eos = get("eos_token_id")
    if not all(type(token) is int for token in (eos if isinstance(eos, list) else [] if eos is None else [eos])):
        yield f"eos_token_id={json.dumps(eos)} is neither the number of a token nor a list of them"
    heads, kv_heads = sizes["num_attention_heads"], sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    if heads % kv_heads:
        yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
    rotated = sizes.get("head_dim") or sizes["hidden_size"] // heads
    if rotated % 2:
        of = "" if "head_dim" in sizes else f" of hidden_size={sizes['hidden_size']} and num_attention_heads={heads}"
        yield f"head_dim={rotated}{of} is odd, and cannot be rotated in pairs"
    if get("hidden_act") not in ACTIVATIONS:
        yield f"hidden_act={get('hidden_act')!r} is not supported; choose from {', '.join(ACTIVATIONS)}"
    for key in get.family.refused:
        if get(key):
            way = f", as with {key}=false" if isinstance(get(key), bool) else ""
            yield f"{key}={json.dumps(get(key))} is not supported: only models without it are{way}"
    for key in get.family.absent:
        if key in get.written:
            yield f"{key} is not supported, whatever its value: leave it out"
    for key in _switches(get.family):
        if type(get.written.get(key, False)) is not bool:
            yield f"{key}={json.dumps(get(key))} is neither true nor false"
    if get.family.window_switch == "use_sliding_window" and type(get("max_window_layers")) is not int:
        yield f"max_window_layers={json.dumps(get('max_window_layers'))} is not a number"
    if not get.written.get("is_causal", True):
        yield f"is_causal={json.dumps(get('is_causal'))} is not supported: only models with is_causal=true"
    if get("per_layer_config"):
        yield "per_layer_config, which makes layers differ, is not supported"
    for key in get.family.multipliers:
        if not is_positive(get(key)):
            yield f"{key}={json.dumps(get(key))} is not a positive number"
    try:
        _rotates(get)
    except ValueError as problem:
        yield str(problem)
    for block in (get.family.layer, get.family.linear_layer):
        if block is not None and block.refuses is not None:
            yield from block.refuses(get)
    if isinstance(text, dict) and text.get("tie_word_embeddings", tied := get("tie_word_embeddings")) != tied:
        yield f"tie_word_embeddings={json.dumps(tied)} contradicts text_config: make them equal"
    if get("quantization_config"):
        yield "config.json sets quantization_config: dequantise the checkpoint first"
    if (kinds := get("layer_types")) is not None and len(kinds) != (count := sizes["num_hidden_layers"]):
        yield f"layer_types has {plural(len(kinds), 'value')}, but num_hidden_layers={count}"
    elif _has_sliding_window(get):
        yield _windows(get)
    yield from _unsupported_rope(get, rotated)


def _quoted(value: Any) -> str:
    """Return the start of a value, as config.json has it."""
    return json.dumps(value)[:80]


def _switches(family: Family) -> list[str]:
    """Return the keys of config.json that the family's configuration class takes as true or false alone."""
    read = {family.qkv_bias, family.out_bias, family.mlp_bias, family.window_switch, *family.refused}
    found = [key for key in ("attention_bias", "mlp_bias", "use_sliding_window") if key in read]
    return [*found, "tie_word_embeddings", *(["norm_topk_prob"] if family.has_experts else [])]


def _has_sliding_window(get: Settings) -> bool:
    switch, kinds = get.family.window_switch, get("layer_types")
    if get.family.linear_layer:
        return False
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        return True
    if switch == "sliding_window":
        return get(switch) is not None
    if kinds is not None or switch is None or get.written.get("sliding_window", 0) is None:
        return False
    first = get("max_window_layers")  # anything but a number is refused by itself
    return bool(get(switch)) and type(first) is int and first < get("num_hidden_layers")


def _windows(get: Settings) -> str:
    """Say which key turns on sliding windows, and how to turn them off."""
    others = [kind for kind in get("layer_types") or () if kind != "full_attention"]
    switch, window = get.family.window_switch, get("sliding_window")
    if others:
        found, off = f"layer_types has {others[0]!r}", '"full_attention" for all layers'
    else:
        found = f"{switch}={json.dumps(get(str(switch)))}"
        off = f"{switch}={'null' if switch == 'sliding_window' else 'false'}"
    is_window = others[:1] in ([], ["sliding_attention"])
    is_harmless = type(window) is int and window > 0 and is_window
    same = f", which changes nothing for sequences of at most {window} tokens" if is_harmless else ""
    what = "sliding-window attention" if is_window else "this attention"
    return f"{found}: {what} is not supported; set {off} in config.json{same}"


def _rope(get: Settings) -> dict[str, Any]:
    """Return the rope settings under transformers 5's names, read in transformers' order.

    `rope_scaling`, the older name, replaces `rope_parameters` as a whole. Inside, rope_theta and partial_rotary_factor
    win over the same keys outside; of original_max_position_embeddings the one outside wins.

    Example: {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}} is read as
    {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}.

    Source: transformers/modeling_rope_utils.py, convert_rope_params_to_dict and standardize_rope_params.
    """
    rope = dict(get("rope_scaling") or get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", get("rope_theta"))
    if (partial := get("partial_rotary_factor")) is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in ("llama3", "yarn") and (key := "original_max_position_embeddings") in get.written:
        rope[key] = get(key)
    # positions of text are equal in all three sections
    return {key: value for key, value in rope.items() if not key.startswith("mrope_")}


def _unsupported_rope(get: Settings, head_dim: int) -> Iterator[str]:
    rope = _rope(get)
    if any(isinstance(value, dict) for value in rope.values()):
        yield "rope_parameters of layers that differ are not supported: only one object for all layers"
        return
    kind = rope["rope_type"]
    if kind not in list(ROPE_TYPES):  # which also takes values that cannot be hashed
        yield f"rope scaling {kind!r} is not supported; choose from {', '.join(ROPE_TYPES)}"
        return
    if replaced := get("rope_scaling") and get("rope_parameters"):
        for key in ("rope_theta", "partial_rotary_factor"):
            if key not in get("rope_scaling") and key in replaced and replaced[key] != rope.get(key):
                yield (
                    "config.json has rope_scaling and rope_parameters, and transformers reads rope_scaling alone: "
                    f"{key}={replaced[key]} of rope_parameters would be lost; put all values into rope_parameters, and "
                    "remove rope_scaling"
                )
    needed, optional = ROPE_TYPES[kind]
    for key in (*needed, "rope_theta"):
        if not is_positive(rope.get(key)):
            found = f", not {_quoted(rope[key])}" if key in rope else ""
            yield f"rope scaling {kind!r} needs the positive number {key!r}{found}"
    for key in optional:
        value, whole = rope.get(key), key == "original_max_position_embeddings"
        if not (is_positive(value) if whole and key in rope else value is None or is_positive(value)):
            yield f"rope scaling {kind!r} has {key}={json.dumps(value)}, which is not a positive number"
    if kind == "yarn" and type(rope.get("truncate", True)) is not bool:
        yield f"rope scaling 'yarn' has truncate={json.dumps(rope['truncate'])}, which is neither true nor false"
    if kind == "yarn" and rope["rope_theta"] == 1:
        yield "rope scaling 'yarn' needs another rope_theta than 1"
    factor = rope.get("partial_rotary_factor", 1.0)
    if _is_partial(get):
        turned = int(head_dim * factor) if is_positive(factor) and factor <= 1 else 0
        if turned == 0 or turned % 2:
            yield f"partial_rotary_factor={factor} does not give an even number of a head's {head_dim} dimensions"
    elif factor != 1:
        yield f"partial_rotary_factor={factor} is not supported with model_type {get('model_type')!r}, only 1"


def _is_partial(get: Settings) -> bool:
    """Return whether the family rotates only the first dimensions of a head."""
    return "partial_rotary_factor" in get.family.defaults


def entries(shape: ModelShape) -> Iterator[Entry]:
    """Iterate over all parameters of the whole model, embedding first, in a fixed order. Tied weights appear once."""
    embedding, *after = outside_entries(shape)
    yield embedding
    for number, layer in enumerate(shape.layers):
        yield from layer_entries(shape, layer, number)
    yield from after


def outside_entries(shape: ModelShape) -> Iterator[Entry]:
    """Iterate over the parameters outside the layers: embedding, final norm, and the head unless it is tied."""
    return _entries(shape, [*shape.outside, VALUE_HEAD])


def layer_entries(
    shape: ModelShape, layer: LayerShape, number: int = 0, experts: Iterable[int] | None = None
) -> Iterator[Entry]:
    """Iterate over the parameters of one layer; consecutive parameters of experts come expert by expert.

    Args:
        experts: the numbers of the experts to include; None means all.
    """
    return _entries(shape, layer.block.parameters, layer, number, experts)


def _entries(
    shape: ModelShape,
    parameters: Sequence[Parameter],
    layer: LayerShape | None = None,
    number: int | None = None,
    experts: Iterable[int] | None = None,
) -> Iterator[Entry]:
    sizes = {
        "V": shape.vocab_size,
        "E": shape.hidden_size,
        "D": shape.head_dim,
        "G": shape.num_kv_heads,
        "Q": shape.num_heads * shape.head_dim,
        "K": shape.num_kv_heads * shape.head_dim,
        "1": 1,
        "P": 2 * shape.num_heads * shape.head_dim,
    }
    if shape.adapters is not None:
        sizes["R"] = shape.adapters.rank
    if layer is not None:
        match layer.mlp:
            case Dense() as mlp:
                sizes |= {"F": mlp.ffn_size}
            case Experts() as mlp:
                sizes |= {"X": mlp.num_experts, "M": mlp.ffn_size, "S": mlp.shared_ffn_size}
        if (linear := layer.linear) is not None:
            sizes |= {"n": linear.num_value_heads, "d": linear.value_dim, "v": linear.values, "k": linear.keys}
            sizes |= {"C": linear.conv_channels, "W": linear.conv_width}
    ours, theirs = ("", "") if number is None else (f"decoder.layers.{number}.", f"model.layers.{number}.")
    present = [p for p in parameters if p.only_if is None or getattr(shape, p.only_if)]
    for of_experts, group in groupby(present, key=lambda p: isinstance(p.split, EachExpert)):
        numbers: Iterable[int | None] = [None]
        if of_experts:
            numbers = range(sizes["X"]) if experts is None else experts
        for expert, parameter in product(numbers, list(group)):
            yield Entry(
                ours + parameter.name.format(expert),
                number,
                expert,
                parameter.split,
                tuple(shape.tensor_name(theirs + name.format(expert)) for name in parameter.tensors),
                tuple(tuple(sizes[letter] for letter in dims) for dims in parameter.tensors.values()),
                sizes,
                parameter.trained,
                parameter.stored,
                None if parameter.stacked is None else shape.tensor_name(theirs + parameter.stacked),
            )


def base_tensors(shape: ModelShape) -> list[str]:
    """List the tensors that stay as the model's folder has them, and that training checkpoints therefore lack."""
    return list(tensors_of(entry for entry in entries(shape) if not is_kept(entry)))


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors in a Hugging Face folder of this model, in the order of the layers."""
    return tensors_of(filter(is_stored, entries(shape)))


def tensors_of(parameters: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of some parameters."""
    return {name: size for entry in parameters for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)}


def rotary_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Compute inverse frequencies, float32 [rotary_dim / 2], and the factor on cosine and sine (1 except for yarn).

    Source: transformers/modeling_rope_utils.py.
    """
    import torch

    kind = shape.rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.int64).float() / shape.rotary_dim
        return 1.0 / shape.rope["rope_theta"] ** exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=shape.num_heads * shape.head_dim,  # checked, but only head_dim is used
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rope_parameters=dict(shape.rope),
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
