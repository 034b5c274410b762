"""What a family is made of: its description, the tables of parameters, and plain Llama's layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bapo_megatron.hf.splits import Copy, EvenColumns, EvenRows, Interleaved, Split, Vocab
from bapo_megatron.hf.streams import ModelStream

# Letters of sizes: V vocabulary, E hidden size, D head dimension, G key-value heads, Q query heads x D, K = G x D, F
# feed-forward size, 1 one. With experts: X their number, M one expert's feed-forward size, S the shared experts'. With
# an output gate: P = 2 x Q. With linear attention: n value heads, d dimension of a value head, v = n x d, k dimensions
# of all key heads, C = 2k + v channels of the convolution, W its width. With adapters: R their rank.
LETTERS = frozenset("VEDGQKF1XMSPndvkCWR")

COPY, VOCAB, ROWS, COLUMNS, QKV = Copy(), Vocab(), EvenRows(), EvenColumns(), Interleaved("G")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter under Megatron's name, and the checkpoint tensors it consists of.

    `tensors` gives each tensor's dimensions, one letter of `LETTERS` each. "{}" in the names stands for an expert's
    number, if each expert has the parameter (split by `EachExpert`).
    """

    name: str
    split: Split
    tensors: dict[str, str]
    only_if: str | None = None  # the field of ModelShape that says whether the model has the parameter
    trained: bool = True  # others have neither gradient nor moments, and keep their values
    stored: bool = True  # others are in no Hugging Face folder and no engine, but in training checkpoints
    stacked: str | None = None  # the one tensor that folders may hold in place of all experts' (`hf.stacks.Stack`)

    def __post_init__(self) -> None:
        if unknown := sorted(set("".join(self.tensors.values())) - LETTERS):
            raise ValueError(f"{self.name}: there is no size {', '.join(unknown)}; see hf/families/parts.py")


@dataclass(frozen=True, slots=True)
class Block:
    """One kind of layer: its parameters, the two functions that compute it, and what they do not compute.

    A function is given as it is, or as "module:name", which is imported on first use: this file knows neither torch nor
    Megatron. A family of one's own gives functions that import what they need.
    """

    parameters: tuple[Parameter, ...]
    trainer: str | Callable[..., Any] = "bapo_megatron.learner.layers:pre_norm"  # takes a `Kit`
    engine: str | Callable[..., Any] = "bapo_megatron.engines.embedded.layers:pre_norm"  # takes (x_BTE, `LayerPass`)
    # takes `Settings`, and names the settings of config.json with which the block would compute something else
    refuses: Callable[[Any], Iterable[str]] | None = None


EMBEDDING = Parameter("embedding.word_embeddings.weight", VOCAB, {"model.embed_tokens.weight": "VE"})
# Trainer names start with "decoder.layers.<i>.", tensor names with "model.layers.<i>."; see also `Family.prefix`.
ATTENTION = (
    Parameter("input_layernorm.weight", COPY, {"input_layernorm.weight": "E"}),
    Parameter(
        "self_attention.linear_qkv.weight",
        QKV,
        {"self_attn.q_proj.weight": "QE", "self_attn.k_proj.weight": "KE", "self_attn.v_proj.weight": "KE"},
    ),
    Parameter(
        "self_attention.linear_qkv.bias",
        QKV,
        {"self_attn.q_proj.bias": "Q", "self_attn.k_proj.bias": "K", "self_attn.v_proj.bias": "K"},
        only_if="qkv_bias",
    ),
    Parameter("self_attention.q_layernorm.weight", COPY, {"self_attn.q_norm.weight": "D"}, only_if="qk_norm"),
    Parameter("self_attention.k_layernorm.weight", COPY, {"self_attn.k_norm.weight": "D"}, only_if="qk_norm"),
    Parameter("self_attention.linear_proj.weight", COLUMNS, {"self_attn.o_proj.weight": "EQ"}),
    Parameter("self_attention.linear_proj.bias", COPY, {"self_attn.o_proj.bias": "E"}, only_if="out_bias"),
    Parameter("pre_mlp_layernorm.weight", COPY, {"post_attention_layernorm.weight": "E"}),
)
GATED_MLP = (
    Parameter("mlp.linear_fc1.weight", ROWS, {"mlp.gate_proj.weight": "FE", "mlp.up_proj.weight": "FE"}),
    Parameter("mlp.linear_fc1.bias", ROWS, {"mlp.gate_proj.bias": "F", "mlp.up_proj.bias": "F"}, "mlp_bias"),
    Parameter("mlp.linear_fc2.weight", COLUMNS, {"mlp.down_proj.weight": "EF"}),
    Parameter("mlp.linear_fc2.bias", COPY, {"mlp.down_proj.bias": "E"}, only_if="mlp_bias"),
)
LAYER = Block((*ATTENTION, *GATED_MLP))
FINAL_NORM = Parameter("decoder.final_layernorm.weight", COPY, {"model.norm.weight": "E"})
OUTPUT = Parameter("output_layer.weight", VOCAB, {"lm_head.weight": "VE"}, only_if="has_output_layer")
OUTSIDE = (EMBEDDING, FINAL_NORM, OUTPUT)
# Named as in transformers' ...ForSequenceClassification.
VALUE_HEAD = Parameter("score.weight", COPY, {"score.weight": "1E"}, only_if="has_value_head")

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # values of hidden_act in config.json

_ORIGINAL = "original_max_position_embeddings"
# Supported types, whose frequencies do not depend on the sequence length: the numbers that each one needs, and those
# that it can do without.
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "yarn": (("factor",), (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
}


@dataclass(frozen=True, slots=True)
class Family:
    """How one `model_type` differs from plain Llama. A string names the config.json key to read."""

    model_type: str  # as in config.json
    qkv_bias: bool | str = False  # on the query, key and value projections
    out_bias: bool | str = False  # on the attention's output projection
    mlp_bias: bool | str = False  # on gate, up and down
    qk_norm: bool = False  # RMSNorm over the head dimension of queries and keys, before the rotary embedding
    norm_plus_one: bool = False  # every norm multiplies by 1 + weight
    scaled_embedding: bool | str = False  # embeddings are multiplied by sqrt(hidden size), or by the key's number
    attention_scale: str | None = None  # attention multiplies its scores by it, and not by 1 / sqrt(head dimension)
    residual_scale: str | None = None  # attention and MLP multiply their outputs by it: needs a block that does so
    logits_scale: str | None = None  # logits are divided by it
    rotates: Callable[[Any], list[bool]] | None = None  # takes `Settings`: whether each layer rotates queries and keys
    has_experts: bool = False  # every MLP is a mixture of experts, described by Qwen3-MoE's keys
    has_shared_expert: bool = False  # each mixture also has an expert that every token passes, as Qwen3.5's keys say
    output_gate: bool = False  # each query head comes with a gate of the attention's output
    window_switch: str | None = None  # the key that turns on sliding windows, which are refused
    refused: tuple[str, ...] = ()  # keys that change the computation, refused unless absent, null or false
    absent: tuple[str, ...] = ()  # keys that change it whatever their value, even null
    defaults: dict[str, Any] = field(default_factory=dict)  # transformers' own, for keys missing in config.json
    not_null: tuple[str, ...] = ()  # keys that may be missing, but must be a number if they are there
    legacy: dict[str, dict[str, Any]] = field(default_factory=dict)  # key -> old value -> what it means
    layer: Block = LAYER
    linear_layer: Block | None = None  # a layer with linear attention, described by Qwen3.5's keys
    outside: tuple[Parameter, ...] = OUTSIDE  # parameters outside the layers; a family of yours may freeze them
    prefix: str = "model."  # tensor names start with it, except the head; another one means a text_config
    unread: tuple[str, ...] = ()  # how the names of tensors start that belong to other parts, and stay unread
    streams: tuple[ModelStream, ...] = ()  # what its models compute per token, for trainers to learn with

    @property
    def multipliers(self) -> list[str]:
        """The keys of config.json that hold multipliers."""
        keys = (self.scaled_embedding, self.attention_scale, self.residual_scale, self.logits_scale)
        return [key for key in keys if isinstance(key, str)]


# For every family, unless its own `defaults` have the key.
COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_window_layers": 0,
}
