"""Checks that models fit the layout, and that a reference policy, a teacher and a critic fit the policy."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config.base import Violation
from bapo_megatron.config.schema import Config, LoraConfig, ParallelConfig
from bapo_megatron.errors import CheckpointError, in_one_line, plural
from bapo_megatron.hf.adapters import Adapters
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.peft_config import read_adapters
from bapo_megatron.hf.shape import LayerShape, ModelShape, layer_entries, runs
from bapo_megatron.hf.streams import routes
from bapo_megatron.hf.tokenizer import difference, load_tokenizer
from bapo_megatron.learner.precision import Machine, check_linear_attention

_OF_MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization
    layernorm_epsilon layernorm_zero_centered_gamma gated_linear_unit activation_func add_bias_linear add_qkv_bias
    qk_layernorm attention_output_gate softmax_scale no_rope_freq num_moe_experts moe_ffn_hidden_size moe_router_topk
    moe_router_score_function moe_router_pre_softmax moe_shared_expert_intermediate_size moe_shared_expert_gate
"""
_OF_LAYOUT = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "num_layers_in_first_pipeline_stage": "parallel.last_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "pipeline_model_parallel_layout": "parallel.last_stage_layers",
    "account_for_embedding_in_pipeline_split": "parallel.last_stage_layers",
    "account_for_loss_in_pipeline_split": "parallel.last_stage_layers",
    "context_parallel_size": "parallel.context",
    "sequence_parallel": "parallel.sequence",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert",
}
OTHER_ADAPTERS = "set lora.init_from to another PEFT folder, or leave it out"
OWN_FIELDS = dict.fromkeys(_OF_MODEL.split(), "the config.json of model.path") | _OF_LAYOUT
"""Fields of Megatron's TransformerConfig that follow from model and layout, and where to set them instead."""

Problem = tuple[str, str, str]  # settings of [parallel], the one to change first; the problem; the remedy


def check_frozen(
    config: Config, setting: str, path: str | None, frozen: ModelFacts, policy: ModelFacts, machine: Machine | None
) -> Iterator[Violation]:
    """Check that a frozen model can be compared with the policy, split like it, and computed.

    A teacher may have more rows than the policy if its tokenizer is the same, because these are padding then: see
    `check_tokenizers`.

    Args:
        setting: what names it: loss.reference_path, or one of `TeacherConfig.paths`.
        path: the value of that setting.
        machine: see `check_precision`, which has checked the policy.
    """
    is_teacher = setting.startswith("teacher.")
    settings = (setting,) if is_teacher else (setting, "loss.kl_coef")
    name = f"{setting}={path!r}"
    size, needed = frozen.hf_config.get("vocab_size"), policy.hf_config.get("vocab_size")
    is_padded = isinstance(size, int) and isinstance(needed, int) and size > needed
    if size != needed and not (is_padded and is_teacher):
        yield Violation(
            (*settings, "model.path"),
            f"{name} has a vocabulary of {size} tokens, but the policy's has {needed}: log-probs of "
            "the same tokens cannot be compared",
            "set it to a model of the policy's family, or leave it out",
        )
    elif is_padded and frozen.folder is not None and policy.folder is not None:
        yield from check_tokenizers(setting, path, frozen.folder, policy.folder, policy.own)
    for violation in check_split(config, frozen, setting):
        yield replace(violation, settings=(*settings, *violation.settings[1:]), problem=f"{name}: {violation.problem}")
    of_policy, shape = (None if model.problems else model.shape for model in (policy, frozen))
    if of_policy is None or of_policy.linear is None:
        yield from check_linear_attention(setting, shape, machine)


def check_top_k(top_k: int, tensor: int, policy: ModelShape) -> Iterator[Violation]:
    """Check that each rank of a tensor group has `teacher.top_k` rows of the vocabulary, and that others are left.

    Args:
        tensor: ranks of the group.
    """
    most = min(policy.padded_vocab_size(tensor) // tensor, policy.vocab_size - 1)
    if top_k > most:
        of_rank = f" on each of {tensor} ranks" if tensor > 1 else ""
        yield Violation(
            ("teacher.top_k", "parallel.tensor", "model.path"),
            f"teacher.top_k={top_k}, but of the vocabulary of {policy.vocab_size} tokens at most {most} can be chosen"
            f"{of_rank}",
            f"set it to {most} or less",
        )


def check_tokenizers(
    setting: str, path: str | None, teacher: Path, policy: Path, own: Family | None
) -> Iterator[Violation]:
    """Check that the tokenizer of a teacher's folder is the policy's. Loads both, which takes seconds.

    Args:
        setting: what names the teacher.
        path: the value of that setting.
    """
    try:
        problem = difference(load_tokenizer(teacher, own), load_tokenizer(policy, own))
    except Exception as error:  # transformers raises many kinds for a damaged file
        problem = f"its tokenizer cannot be compared with the policy's: {in_one_line(error)[:300]}"
    if problem:
        yield Violation(
            (setting, "model.path"),
            f"{setting}={path!r}: {problem}",
            "set it to a model with the policy's tokenizer: the teacher scores the policy's tokens by their numbers",
        )


def check_critic_model(config: Config, critic: ModelFacts, policy: ModelFacts) -> Iterator[Violation]:
    """Check that the model of `critic.path` can value the policy's tokens, and be split over the ranks."""
    settings, name = ("critic.path", "advantage.kind"), f"critic.path={config.critic.path!r}"
    size, needed = critic.hf_config.get("vocab_size"), policy.hf_config.get("vocab_size")
    if isinstance(size, int) and isinstance(needed, int) and size < needed:
        yield Violation(
            (*settings, "model.path"),
            f"{name} has a vocabulary of {size} tokens, but the policy's has {needed}",
            "set it to a model of the policy's family, or leave it out",
        )
    for violation in check_split(config, critic, "critic.path"):
        yield replace(violation, settings=(*settings, *violation.settings), problem=f"{name}: {violation.problem}")


def check_split(config: Config, model: ModelFacts, setting: str) -> Iterator[Violation]:
    """Check that the model named by a setting is supported, and can be split over the ranks."""
    if model.problems:
        yield from (Violation((setting,), problem) for problem in model.problems)
        return
    shape, p = model.shape, config.parallel
    for names, problem, remedy in (*_of_tensor(shape, p), *_of_pipeline(shape.num_layers, p), *_of_expert(shape, p)):
        yield Violation((*(f"parallel.{name}" for name in names.split()), setting), problem, remedy)
    if shape.linear is not None:
        yield from _beside_linear_attention(config, setting)
    if shape.experts is not None or shape.linear is not None:
        yield from _only_dense(config, setting, "linear attention" if shape.experts is None else "experts")


def check_adapters(config: Config, model: ModelFacts) -> Iterator[Violation]:
    """Check that the model can have the adapters of `[lora]`."""
    adapters = config.lora.adapters
    if adapters is None or model.problems:
        return
    shape = model.shape
    what = "experts" if shape.experts else "linear attention" if shape.linear else "gates of attention"
    if shape.experts is not None or shape.linear is not None or shape.output_gate:
        yield Violation(
            ("lora.rank", "model.path"),
            f"lora.rank={adapters.rank}: adapters are not supported in a model with {what}",
            "leave [lora] out",
        )
        return
    sizes = (size for layer, _ in runs(shape.layers) for size in _sizes_with_adapters(shape, layer, adapters))
    smallest = min(map(min, sizes))
    if adapters.rank > smallest:
        yield Violation(
            ("lora.rank", "lora.targets", "model.path"),
            f"lora.rank={adapters.rank} is above the smallest size of the layers that get adapters, {smallest}",
            f"set lora.rank={smallest} or less",
        )
    if config.precision.fp8_params:
        yield Violation(
            ("precision.fp8_params", "lora.rank"),
            "precision.fp8_params=true keeps weights in FP8, and lora.rank adds adapters to weights as they are",
            "set precision.fp8_params=false",
        )


def _sizes_with_adapters(shape: ModelShape, layer: LayerShape, adapters: Adapters) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of a layer's matrices that get adapters."""
    for entry in layer_entries(shape, layer):
        for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True):
            if name.endswith(tuple(f".{target}.weight" for target in adapters.targets)):
                yield size


def check_init_from(lora: LoraConfig) -> Iterator[Violation]:
    """Check that `lora.init_from` has the adapters of `[lora]`."""
    adapters, folder = lora.adapters, lora.init_from
    if adapters is None or folder is None:
        return
    try:
        found = read_adapters(Path(folder).expanduser())
    except CheckpointError as error:
        yield Violation(("lora.init_from",), str(error), OTHER_ADAPTERS)
        return
    for name in ("rank", "alpha", "targets"):
        here, there = getattr(adapters, name), getattr(found, name)
        if here != there:
            shown = json.dumps(there)
            yield Violation(
                (f"lora.{name}", "lora.init_from"),
                f"lora.{name}={json.dumps(here)}, and the adapters in lora.init_from={folder!r} have {shown}",
                f"set lora.{name}={shown}",
            )


def check_extra(config: Config) -> Iterator[Violation]:
    """Check that `[megatron.extra]` contradicts neither model nor layout: results would be wrong without an error."""
    for name in sorted(config.megatron.extra.keys() & OWN_FIELDS.keys()):
        problem = f"megatron.extra.{name} follows from model and layout"
        yield Violation((f"megatron.extra.{name}",), problem, f"use {OWN_FIELDS[name]}")


def check_replay(config: Config, model: ModelFacts) -> Iterator[Violation]:
    """Check that `model.replay_routes` has routes to replay, and reaches the routers."""
    if not config.model.replay_routes or model.problems:
        return
    setting, shape = "model.replay_routes", model.shape
    if shape.experts is None or routes(shape) not in model.streams:
        problem = f"{setting}=true, but {model.hf_config['model_type']} models have no routes"
        yield Violation((setting, "model.path", "model.family"), problem, "leave it out")
        return
    if config.train.recompute and "mlp" in (config.train.recompute_modules or ()):
        yield Violation(
            (setting, "train.recompute_modules"),
            f'{setting}=true, but train.recompute_modules with "mlp" recomputes experts without the layer that has '
            "their routes",
            'leave "mlp" out, or recompute whole layers',
        )
    if config.megatron.extra.get("moe_router_fusion"):
        problem = f"{setting}=true, but Megatron's fused router chooses experts itself"
        yield Violation((setting, "megatron.extra"), problem, "leave [megatron.extra] moe_router_fusion out")


def _of_tensor(shape: ModelShape, p: ParallelConfig) -> Iterator[Problem]:
    split = [("attention head", shape.num_heads), ("key-value head", shape.num_kv_heads)]
    split += [("feed-forward row", size) for size in shape.ffn_sizes]
    if (linear := shape.linear) is not None:
        split += [("linear key head", linear.num_key_heads), ("linear value head", linear.num_value_heads)]
    heads, of_experts = all(count % p.tensor == 0 for _, count in split), ""
    if shape.experts is not None and p.expert == 1:
        split.append(("feed-forward row", shape.experts.ffn_size))
        of_experts = ", or set parallel.expert" if heads else ""
    if bad := [plural(count, what) for what, count in split if count % p.tensor]:
        works = _choices(n for n in range(1, shape.num_heads + 1) if all(count % n == 0 for _, count in split))
        problem = f"parallel.tensor={p.tensor} does not divide {', '.join(bad)}"
        yield "tensor expert" if of_experts else "tensor", problem, f"parallel.tensor can be {works}{of_experts}"


def _of_pipeline(layers: int, p: ParallelConfig) -> Iterator[Problem]:
    last = p.last_stage_layers
    if p.pipeline == 1 and last not in (None, layers):
        yield (
            "last_stage_layers pipeline",
            f"parallel.last_stage_layers={last} needs parallel.pipeline above 1",
            "leave it out",
        )
        return
    if last is None and layers % p.pipeline:
        works = _choices(n for n in range(1, layers + 1) if layers % n == 0)
        more = f", or set parallel.last_stage_layers={uneven}" if (uneven := _last_stage(layers, p)) else ""
        problem = f"parallel.pipeline={p.pipeline} does not divide {plural(layers, 'layer')}"
        yield "pipeline", problem, f"parallel.pipeline can be {works}{more}"
        return
    if last is not None and p.pipeline > 1 and (layers <= last or (layers - last) % (p.pipeline - 1)):
        yield (
            "last_stage_layers pipeline",
            f"parallel.last_stage_layers={last} leaves {plural(max(layers - last, 0), 'layer')} of {layers} for the "
            f"other {plural(p.pipeline - 1, 'stage')} of parallel.pipeline={p.pipeline}, which cannot share them "
            "evenly",
            f"set it to {uneven}" if (uneven := _last_stage(layers, p)) else "set a smaller parallel.pipeline",
        )
        return
    for size in dict.fromkeys(p.stage_sizes(layers)):
        if size % p.virtual_pipeline:
            works = _choices(n for n in range(1, size + 1) if all(s % n == 0 for s in p.stage_sizes(layers)))
            problem = f"parallel.virtual_pipeline={p.virtual_pipeline} does not divide the {plural(size, 'layer')}"
            yield "virtual_pipeline", f"{problem} of a stage", f"it can be {works}"
            return


def _last_stage(layers: int, p: ParallelConfig) -> int | None:
    """Return the number of layers of the last stage that differs least from the others'; None if there is none."""
    found = [last for last in range(1, layers) if (layers - last) % (p.pipeline - 1) == 0 and layers - last]
    return min(found, key=lambda last: abs(last - (layers - last) // (p.pipeline - 1)), default=None)


def _of_expert(shape: ModelShape, p: ParallelConfig) -> Iterator[Problem]:
    if shape.experts is None:
        if p.expert > 1:
            problem = f"parallel.expert={p.expert} shares out experts, and the model has none"
            yield "expert", problem, "set parallel.expert=1"
        return
    ranks, count = p.tensor * p.context * p.data, shape.experts.num_experts
    works = f"it can be {_choices(n for n in range(1, count + 1) if not count % n and not ranks % n)}"
    if count % p.expert:
        yield "expert", f"parallel.expert={p.expert} does not divide {plural(count, 'expert')}", works
    elif ranks % p.expert:
        product = f"{p.tensor} x {p.context} x {p.data} = {ranks}"
        problem = f"parallel.expert={p.expert} does not divide parallel.tensor x context x data = {product}"
        yield "expert tensor context data", problem, works
    if p.tensor > 1 and not p.sequence:
        yield (
            "sequence tensor",
            f"experts with parallel.tensor={p.tensor} need parallel.sequence=true",
            "set that, or parallel.tensor=1",
        )


def _beside_linear_attention(config: Config, model: str) -> Iterator[Violation]:
    """Refuse what is not built for layers with linear attention, or would be wrong without an error."""
    if (context := config.parallel.context) > 1:
        yield Violation(
            ("parallel.context", model),
            f"parallel.context={context} is not supported with linear attention, whose state runs through a whole "
            "sequence",
            "set parallel.context=1, and split long sequences by parallel.tensor",
        )


def _only_dense(config: Config, model: str, what: str) -> Iterator[Violation]:
    """Refuse a critic and FP8, which are built for layers of full attention and one MLP."""
    if not config.advantage.compares_responses:
        yield Violation(
            ("advantage.kind", model),
            f'advantage.kind="{config.advantage.kind}": a critic is not supported with {what}',
            'set advantage.kind="grpo"',
        )
    if config.precision.uses_fp8:
        yield Violation(
            ("precision.fp8", model),
            f'precision.fp8="{config.precision.fp8}" is not supported with {what}',
            'set precision.fp8="off"',
        )


def _choices(numbers: Iterable[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
