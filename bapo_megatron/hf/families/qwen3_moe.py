"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts."""

from collections.abc import Iterator

from bapo_megatron.hf.families.parts import ATTENTION, COLUMNS, COPY, ROWS, Block, Family, Parameter
from bapo_megatron.hf.families.settings import Settings
from bapo_megatron.hf.splits import EachExpert
from bapo_megatron.hf.streams import ModelStream, chosen_experts, routes

EXPERTS = (
    Parameter("mlp.router.weight", COPY, {"mlp.gate.weight": "XE"}),
    Parameter(
        "mlp.experts.local_experts.{}.linear_fc1.weight",
        EachExpert(ROWS),
        {"mlp.experts.{}.gate_proj.weight": "ME", "mlp.experts.{}.up_proj.weight": "ME"},
    ),
    Parameter(
        "mlp.experts.local_experts.{}.linear_fc2.weight", EachExpert(COLUMNS), {"mlp.experts.{}.down_proj.weight": "EM"}
    ),
)
_SHARED_EXPERT = "shared_expert_intermediate_size"
_SHARED_EXPERTS = (_SHARED_EXPERT, "n_shared_experts", "num_shared_experts")


def unsupported(get: Settings) -> Iterator[str]:
    """Yield what is not built for experts, or contradicts itself."""
    count, chosen = get("num_experts"), get("num_experts_per_tok")
    if any(other != count for other in get.expert_counts.values()):
        yield " and ".join(f"{key}={n}" for key, n in get.expert_counts.items()) + " contradict each other: remove one"
    elif chosen > count:
        yield f"num_experts_per_tok={chosen} is more than num_experts={count}"
    elif chosen == 1 and get("norm_topk_prob"):
        yield (
            "num_experts_per_tok=1 with norm_topk_prob=true is not supported: the share of the only chosen expert is "
            "always 1, so the router would not learn"
        )
    needed = "every layer needs experts, as with"
    if dense := get("mlp_only_layers"):
        yield f"mlp_only_layers={dense} makes these layers dense, which is not supported: {needed} mlp_only_layers=[]"
    if (step := get("decoder_sparse_step")) not in (None, 1):
        yield (
            f"decoder_sparse_step={step} does not give every layer experts, which is not supported: {needed} "
            "decoder_sparse_step=1"
        )
    for key in _SHARED_EXPERTS:
        if get(key) and not (key == _SHARED_EXPERT and get.family.has_shared_expert):
            yield f"{key}={get(key)}: shared experts are not supported, only models without them, as with {key}=0"


MIXTURE_LAYER = Block((*ATTENTION, *EXPERTS), refuses=unsupported)

FAMILY = Family(
    "qwen3_moe",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm=True,
    has_experts=True,
    refused=("use_sliding_window",),
    not_null=("num_key_value_heads", "head_dim"),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    layer=MIXTURE_LAYER,
    streams=(ModelStream(routes, chosen_experts),),
)
