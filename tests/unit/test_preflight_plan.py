"""The plan's arithmetic against counts by hand, and what it suggests."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.cli import main
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, ConfigError
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.machine.gpus import GIB, GPUS, device_peak_flops, kind_of
from bapo_megatron.machine.memory import BATCH_BYTES, forwards_under_way, microbatch_tokens, trainer_memory
from bapo_megatron.machine.parameters import Held, model_parameters
from bapo_megatron.machine.server_memory import server_memory
from bapo_megatron.preflight import plan, work
from bapo_megatron.preflight.check import accepts_layout, load_checked
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.checks.slurm import check_placement
from bapo_megatron.preflight.explain import memory_parts, outline
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.preflight.plan import check_machines, check_memory, check_unused, make_plan, planned, step_balance
from bapo_megatron.preflight.suggest import best_split, lighter, suggest
from bapo_megatron.preflight.work import decode_seconds
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.step_tokens import StepTokens
from tests.resolving import shaped

HF_CONFIG = KNOWN_MODELS["DeepSeek-R1-Distill-Qwen-7B"]
SHAPE = model_shape(HF_CONFIG)
GPU_BYTES = 80 * GIB


def recipe(*overrides: str) -> Config:
    """Load a recipe that recomputes everything, whatever the plan would choose."""
    files = ["recipes/r1-distill-qwen-7b-32k", "algorithms/bapo", "clusters/4x8-h100"]
    return load_config(files, ["train.recompute=true", *overrides])


def test_six_flops_per_weight_and_token() -> None:
    """The usual rule holds for a model whose attention and embedding are small compared with its matrices."""
    tokens = StepTokens(num_sequences=1, prompt=1, response=63)
    config = recipe("train.recompute=false")
    rule = 6 * (model_parameters(SHAPE) - 2 * SHAPE.vocab_size * SHAPE.hidden_size) * tokens.total
    output = 8 * SHAPE.vocab_size * SHAPE.hidden_size * 63  # logits twice, two gradients
    assert math.isclose(work.step_flops(shaped(config, SHAPE), tokens, 0), rule + output, rel_tol=2e-3)


def test_the_expected_mfu_leaves_out_what_is_done_twice() -> None:
    """Without recomputation, scoring and messages, only computing logits twice lowers the assumed share of the peak."""
    alone = ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=1", "bapo.scope=lagged"]
    plan = make_plan(shaped(recipe(*alone, "train.recompute=false"), SHAPE))
    layers, output = work.forward_flops(SHAPE, plan.tokens)
    assert plan.mfu == pytest.approx(0.4 * 3 * (layers + output) / (3 * layers + 4 * output))
    assert make_plan(shaped(recipe(*alone), SHAPE)).mfu < plan.mfu
    assert make_plan(shaped(recipe(*alone[:-1], "train.recompute=false"), SHAPE)).mfu < plan.mfu


def test_the_plan_names_the_levers_that_are_not_used() -> None:
    def unused(*overrides: str) -> set[str]:
        return {setting.partition("=")[0] for setting in make_plan(shaped(recipe(*overrides), SHAPE)).unused}

    off = {"train.recompute", "bapo.scope", "precision.fp8", "sglang.extra.enable_nccl_nvls"}
    assert unused() == off
    assert unused("parallel.overlap_communication=false") - off == {"parallel.overlap_communication"}
    assert unused("parallel.pipeline=2", "parallel.data=2") - off == {"parallel.virtual_pipeline"}
    assert unused("checkpoint.asynchronous=false") - off == {"checkpoint.asynchronous"}
    assert unused("cluster.gpu=a100") == {"train.recompute", "bapo.scope"}
    on = ("train.recompute=none", "precision.fp8=hybrid", "bapo.scope=lagged", "sglang.extra.enable_nccl_nvls=true")
    assert unused(*on) == set()
    assert unused("loss.name=grpo", *on[:2], on[3]) == set(), "no search"


def test_recomputation_repeats_the_forward_flops_of_what_it_covers() -> None:
    tokens = StepTokens(num_sequences=1, prompt=1, response=63)
    layers, _ = work.forward_flops(SHAPE, tokens)

    def repeated(*overrides: str) -> float:
        flops = [
            work.step_flops(shaped(recipe(*each), SHAPE), tokens, 0) for each in (overrides, ["train.recompute=false"])
        ]
        return (flops[0] - flops[1]) / layers

    mlp = 3 * SHAPE.hidden_size * SHAPE.ffn_sizes[0] * SHAPE.num_layers * 2 * tokens.total / layers
    attention = 2 * SHAPE.num_heads * SHAPE.head_dim * tokens.per_sequence * tokens.total * SHAPE.num_layers / layers
    assert math.isclose(repeated("train.recompute=true"), 1)
    assert math.isclose(repeated("train.recompute_layers=7"), 7 / 28)
    assert math.isclose(repeated("train.recompute_layers=99"), 1)
    assert math.isclose(repeated('train.recompute_modules=["mlp"]'), mlp)
    assert math.isclose(repeated('train.recompute_modules=["core_attn"]'), attention)
    assert math.isclose(repeated("train.recompute=false", 'train.recompute_modules=["mlp"]'), 0, abs_tol=1e-12)


def test_partial_recomputation_lies_between_all_and_nothing() -> None:
    parts = "train.recompute_layers=20", 'train.recompute_modules=["mlp"]'
    ways = ("train.recompute=true", *parts, "train.recompute=false")
    kept = [trainer_memory(shaped(recipe(way), SHAPE), gpu_bytes=GPU_BYTES).activations for way in ways]
    assert kept[0] < min(kept[1:3]) <= max(kept[1:3]) < kept[3]


def test_whole_layers_and_parts_of_all_layers_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="recompute_layers chooses whole layers"):
        recipe("train.recompute_layers=2", 'train.recompute_modules=["mlp"]')


def test_attention_counts_each_pair_of_tokens_once() -> None:
    """The sum over positions gives the same: a query at position i meets i keys, in two products."""
    tokens = StepTokens(num_sequences=3, prompt=50, response=950)
    layers, _ = work.forward_flops(SHAPE, tokens)
    without, _ = work.forward_flops(SHAPE, StepTokens(tokens.total, prompt=1, response=0))
    pairs = 3 * sum(range(1, 1001))
    by_hand = 2 * 2 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_dim * pairs
    assert math.isclose(layers - without, by_hand, rel_tol=3e-3)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ("loss.name=grpo", 0),
        ("bapo.scope=lagged", 0),
        ("bapo.scope=microbatch", 0),
        ("train.schedule=interleaved", 1),
        ("train.schedule=interleaved loss.name=m2po", 1),
        ("train.schedule=forwards_first", 0),
        ("train.schedule=interleaved train.epochs_per_step=3", 3),
        ("train.schedule=interleaved loss.proximal=learner loss.kl_coef=0.1", 3),
    ],
)
def test_scoring_passes(overrides: str, passes: int) -> None:
    config = recipe(*overrides.split())
    forwards_first = config.train.schedule == "forwards_first"
    assert work.num_scoring_passes(config, forwards_first) == passes


def test_what_the_distributed_optimizer_saves() -> None:
    whole = trainer_memory(shaped(recipe("optimizer.distributed=false"), SHAPE), gpu_bytes=GPU_BYTES)
    split = trainer_memory(shaped(recipe(), SHAPE), gpu_bytes=GPU_BYTES)
    assert whole.optimizer == 12 * whole.held.total
    assert math.isclose(split.optimizer, whole.optimizer / 4, rel_tol=1e-6)
    assert (split.weights, split.gradients) == (whole.weights, whole.gradients)


@pytest.mark.parametrize("distributed", ["true", "false"])
def test_float32_weights_have_no_master_copy(distributed: str) -> None:
    ways = [(f"optimizer.distributed={distributed}", f"model.dtype={dtype}") for dtype in ("bfloat16", "float32")]
    low, full = (trainer_memory(shaped(recipe(*way), SHAPE), gpu_bytes=GPU_BYTES) for way in ways)
    assert full.optimizer * 3 == low.optimizer * 2


def test_forward_passes_first_keep_every_micro_batch() -> None:
    by_turns = trainer_memory(shaped(recipe("train.schedule=interleaved"), SHAPE), gpu_bytes=GPU_BYTES)
    all_first = trainer_memory(shaped(recipe("train.schedule=forwards_first"), SHAPE), gpu_bytes=GPU_BYTES)
    auto = trainer_memory(shaped(recipe(), SHAPE), gpu_bytes=GPU_BYTES)
    assert by_turns.activations < auto.activations < all_first.activations
    kept = forwards_under_way(shaped(recipe(), SHAPE), GPU_BYTES)
    inputs = 34816 // 4 * SHAPE.hidden_size * 2 * SHAPE.num_layers  # inputs of one micro-batch
    assert kept == int(0.1 * GPU_BYTES / inputs) > 1, "auto: layer inputs take a tenth of the memory"


def test_a_reference_policy_costs_its_weights() -> None:
    without, with_kl = (
        trainer_memory(shaped(recipe(o), SHAPE), gpu_bytes=GPU_BYTES) for o in ("run.seed=0", "loss.kl_coef=0.1")
    )
    assert with_kl.total - without.total == without.weights


LORA_SIZES = {  # inputs and outputs of a layer's linears in DeepSeek-R1-Distill-Qwen-7B
    "q_proj": (3584, 3584),
    "k_proj": (3584, 512),
    "v_proj": (3584, 512),
    "o_proj": (3584, 3584),
    "gate_proj": (3584, 18944),
    "up_proj": (3584, 18944),
    "down_proj": (18944, 3584),
}


@given(st.integers(1, 512), st.sets(st.sampled_from(sorted(LORA_SIZES)), min_size=1))
def test_gradients_and_adam_have_the_elements_of_the_adapters(rank: int, targets: set[str]) -> None:
    lora = [f"lora.rank={rank}", f"lora.targets={sorted(targets)}", "parallel.sequence=false"]
    one = ["parallel.tensor=1", "parallel.num_ranks=1", "optimizer.distributed=false"]
    memory = trainer_memory(resolve(recipe(*lora, *one), HF_CONFIG), gpu_bytes=GPU_BYTES)
    elements = 28 * sum(rank * sum(LORA_SIZES[target]) for target in targets)
    assert memory.trained == Held(elements)
    assert (memory.gradients, memory.optimizer) == (4 * elements, 12 * elements)
    assert memory.weights == 2 * (model_parameters(SHAPE) + elements)


def test_adapters_are_split_along_their_longer_side() -> None:
    """B of q, k, v, gate and up, and A of o and down are split; tensor ranks have copies of the others."""
    memory = trainer_memory(resolve(recipe("lora.rank=16", "optimizer.distributed=false"), HF_CONFIG))
    columns, rows = (
        [LORA_SIZES[n] for n in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")],
        [LORA_SIZES[n] for n in ("o_proj", "down_proj")],
    )
    of_layer = sum(i + o // 4 for i, o in columns) + sum(i // 4 + o for i, o in rows)
    assert memory.trained.total == 28 * 16 * of_layer


def test_a_reference_is_the_model_without_adapters_or_a_copy_of_the_first_ones() -> None:
    def reference(*overrides: str) -> int:
        return trainer_memory(resolve(recipe("lora.rank=16", *overrides), HF_CONFIG), gpu_bytes=GPU_BYTES).reference

    trained = trainer_memory(resolve(recipe("lora.rank=16"), HF_CONFIG)).trained.total
    assert reference("loss.kl_coef=0.1") == 0
    assert reference("loss.kl_coef=0.1", "lora.init_from=adapters") == 2 * trained
    without = trainer_memory(shaped(recipe(), SHAPE), gpu_bytes=GPU_BYTES).weights
    assert reference("loss.kl_coef=0.1", "loss.reference_path=models/other") == without


def test_a_teacher_counts_with_its_own_size() -> None:
    """The recipe's 7B learns from a 32B of the same family; an unknown teacher counts as the policy does."""
    large = KNOWN_MODELS["DeepSeek-R1-Distill-Qwen-32B"]
    without = make_plan(resolve(recipe(), HF_CONFIG))
    taught = make_plan(resolve(recipe("teacher.path=models/32B"), HF_CONFIG, {"models/32B": large}))
    unknown = make_plan(resolve(recipe("teacher.path=models/other"), HF_CONFIG))
    assert without.trainer.teachers == 0
    on_rank = model_parameters(model_shape(large)) / 4  # tensor=4; the rows of norms are on each
    assert taught.trainer.teachers == pytest.approx(2 * on_rank, rel=1e-3)
    assert unknown.trainer.teachers == without.trainer.weights
    extra = taught.trainer.teachers
    assert taught.trainer.total - without.trainer.total == taught.trainer.moved - without.trainer.moved == extra
    assert taught.trainer.frozen - without.trainer.frozen == extra
    assert ("teachers", extra, "weights") in memory_parts(taught.trainer)
    layers, output = work.forward_flops(replace(model_shape(large), vocab_size=SHAPE.vocab_size), without.tokens)
    assert taught.flops - without.flops == pytest.approx(layers + output, rel=1e-9)
    assert unknown.flops - without.flops == pytest.approx(sum(work.forward_flops(SHAPE, without.tokens)), rel=1e-9)
    assert taught.train.least > unknown.train.least > without.train.least


WEIGHTS = {"a": 1, "b": 2, "c": 5}


def test_several_teachers_each_count_with_their_size_and_their_share_of_the_work() -> None:
    """Of three sources with the weights 1, 2 and 5, the last two have one teacher, which is held once."""
    large, small = KNOWN_MODELS["DeepSeek-R1-Distill-Qwen-32B"], HF_CONFIG
    weights = ", ".join(f'{{name = "{name}", source = "chains", weight = {n}}}' for name, n in WEIGHTS.items())
    by_source = 'teacher.path_by_source={a = "models/32B", b = "models/7B", c = "models/7B"}'
    sources = f"data.sources=[{weights}]"
    without = make_plan(resolve(recipe(sources), HF_CONFIG))
    for top_k in (0, 64):
        settings = (sources, by_source, f"teacher.top_k={top_k}")
        run = resolve(recipe(*settings), HF_CONFIG, {"models/32B": large, "models/7B": small})
        assert "\nteachers   models/32B for a; models/7B for b, c" in outline(run)
        both = make_plan(run)
        alone = [
            make_plan(resolve(recipe(sources, "teacher.path=x", f"teacher.top_k={top_k}"), HF_CONFIG, {"x": one}))
            for one in (large, small)
        ]
        assert both.trainer.teachers == sum(one.trainer.teachers for one in alone)
        assert both.trainer.moved - without.trainer.moved == both.trainer.teachers
        of_each = [one.flops - without.flops for one in alone]
        more = without.flops + of_each[0] / 8 + of_each[1] * 7 / 8
        assert both.flops == pytest.approx(more, rel=1e-9)
        assert alone[1].train.least < both.train.least < alone[0].train.least


def test_a_teacher_with_linear_attention_computes_each_copy_of_a_prompt() -> None:
    """Whether the policy computes a prompt once or not."""
    given = ("teacher.path=x", "data.max_prompt_tokens=1024", "rollout.max_response_tokens=1024")
    of_teacher = {}
    for teacher in ("Qwen2.5-7B-Instruct", "Qwen3.5-9B"):
        for shares in ("true", "false"):
            run = resolve(recipe(*given, f"train.share_prompts={shares}"), HF_CONFIG, {"x": KNOWN_MODELS[teacher]})
            tokens = StepTokens.of(run.config, shares_prompts=run.shares_prompts)
            of_teacher[teacher, shares] = work.step_flops(run, tokens, 0) - work.step_flops(
                replace(run, config=recipe(*given[1:], f"train.share_prompts={shares}")), tokens, 0
            )
    assert of_teacher["Qwen2.5-7B-Instruct", "true"] < 0.9 * of_teacher["Qwen2.5-7B-Instruct", "false"]
    assert of_teacher["Qwen3.5-9B", "true"] == pytest.approx(of_teacher["Qwen3.5-9B", "false"], rel=1e-9)


def test_a_teachers_likeliest_tokens_cost_memory_and_passes() -> None:
    """Of two epochs, each has the teacher's pass, and each pass computes the output layer twice."""
    given = ("teacher.path=models/other", "train.epochs_per_step=2", "parallel.pipeline=2")
    without, likely = (make_plan(resolve(recipe(*given, *more), HF_CONFIG)) for more in ((), ("teacher.top_k=64",)))
    layers, output = work.forward_flops(SHAPE, without.tokens)
    more = 2 * ((SHAPE.passes_of_update + 1) * output + layers + 2 * output) - (layers + output)
    assert likely.flops - without.flops == pytest.approx(more, rel=1e-9)
    assert likely.train.least > without.train.least
    runs = [resolve(recipe(*given, f"teacher.top_k={top_k}"), HF_CONFIG) for top_k in (0, 64, 128)]
    first = [trainer_memory(run, gpu_bytes=GPU_BYTES).batch for run in runs]
    last = [trainer_memory(run, stage=1, gpu_bytes=GPU_BYTES).batch for run in runs]
    assert first[0] == first[1] == first[2] == last[0], "only the last stage has them"
    tokens = last[0] // BATCH_BYTES
    assert last[1] - last[0] == last[2] - last[1] == tokens * 64 * 8
    kept = [trainer_memory(run, stage=1, gpu_bytes=GPU_BYTES) for run in runs]
    assert kept[0].working + kept[0].logits < kept[1].working + kept[1].logits < kept[2].working + kept[2].logits


def test_servers_score_after_a_hint_and_a_teacher_on_servers_costs_nothing() -> None:
    without, hinted, served = (
        make_plan(resolve(recipe(*settings), HF_CONFIG))
        for settings in ((), ("teacher.hint={answer}{prompt}",), ('teacher.urls=["http://x:1"]',))
    )
    assert without.rollout is not None
    assert hinted.rollout is not None
    run = resolve(recipe(), HF_CONFIG)
    flops = sum(work.forward_flops(run.shape, without.tokens)) / run.placement.num_server_gpus
    assert hinted.rollout.least - without.rollout.least == pytest.approx(flops / without.gpu.flops("bfloat16"))
    assert hinted.rollout.expected > without.rollout.expected
    assert hinted.trainer == without.trainer
    assert served == without


def test_a_plan_finds_the_teacher_among_known_models() -> None:
    run = planned(recipe("teacher.path=models/DeepSeek-R1-Distill-Qwen-32B"))
    ((shape, share),) = run.held_teachers
    assert (shape.num_layers, share) == (64, 1.0)
    with pytest.raises(CheckpointError, match=r"teacher\.path = 'models/nothing': there is no folder"):
        planned(recipe("teacher.path=models/nothing"))


def test_a_push_merges_the_largest_weight_with_adapters() -> None:
    def buckets(*overrides: str) -> int:
        return trainer_memory(resolve(recipe(*overrides), HF_CONFIG), gpu_bytes=GPU_BYTES).sync

    assert buckets("lora.rank=16") - buckets() == 2 * 18944 * 3584 // 4 * (3 * 4 + 2), "gate and up"
    assert buckets("lora.rank=16", 'lora.targets=["o_proj"]') - buckets() == 3584 * 3584 // 4 * (3 * 4 + 2)


def test_gradients_of_adapters_alone_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Held] = []

    def keep(config: Config, trained: Held) -> float:
        summed.append(trained)
        return 0.0

    monkeypatch.setattr(work, "gradient_bytes", keep)
    found = make_plan(resolve(recipe("lora.rank=16"), HF_CONFIG))
    assert summed == [found.trainer.trained]
    assert found.trainer.trained.total < 0.02 * found.trainer.held.total


def test_the_plan_says_how_many_parameters_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "algorithms/lora", "clusters/1x1-h100"]
    elements = 28 * 16 * sum(map(sum, LORA_SIZES.values()))
    assert main(["plan", *files]) == 0
    shown = capsys.readouterr().out
    assert f"\nadapters   LoRA of rank 16 trains {elements:,} parameters, 0.53% of the model's, in q_proj, " in shown
    assert f" parameters, of which {elements:,} are trained\n" in shown
    assert main(["check", *files]) == 0
    assert f" parameters, of which {elements:,} are trained\n" in capsys.readouterr().out


def test_adapters_are_proposed_if_they_alone_make_a_trainer_fit() -> None:
    def problem(*overrides: str) -> str:
        return check_memory(resolve(recipe(*overrides), HF_CONFIG))[0].message

    assert check_memory(resolve(recipe("cluster.gpu_memory_gib=20", "lora.rank=16"), HF_CONFIG)) == []
    assert "set lora.rank=16 to train adapters alone, or " in problem("cluster.gpu_memory_gib=20")
    assert "lora" not in problem("cluster.gpu_memory_gib=9")
    assert "lora" not in problem("cluster.gpu_memory_gib=9", "lora.rank=16")


def test_a_critic_costs_nearly_as_much_as_the_policy() -> None:
    """It has the same layers, without the output layer."""
    config = recipe("advantage.kind=gae")
    memory = trainer_memory(shaped(config, SHAPE), gpu_bytes=GPU_BYTES)
    policy = memory.weights + memory.gradients + memory.optimizer
    assert 0.9 * policy < memory.critic < policy
    with_adapters = trainer_memory(shaped(recipe("advantage.kind=gae", "lora.rank=8"), SHAPE), gpu_bytes=GPU_BYTES)
    assert with_adapters.critic == memory.critic, "a critic trains all its weights"


def test_kv_cache_of_a_server() -> None:
    """2 x 28 layers x 4 heads x 128 x bfloat16 are 57,344 bytes per token, shared by 4 ranks."""
    memory = server_memory(shaped(recipe(), SHAPE), 80.0)
    assert memory.kv_bytes_per_token == 57_344 // 4
    assert memory.kv_cache == int(0.85 * 80 * GIB) - model_parameters(SHAPE) * 2 // 4
    assert memory.concurrency == 512 // 4, "all responses of a step fit: four servers share them"
    small = server_memory(shaped(recipe("sglang.extra.mem_fraction_static=0.1"), SHAPE), 80.0)
    assert small.concurrency == small.kv_tokens // (2048 + 32768)


def test_decoding_one_response_reads_the_weights_once_a_token() -> None:
    config = recipe("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "train.minibatches_per_step=1")
    tokens = StepTokens.of(config, 100)
    seconds = decode_seconds(shaped(config, SHAPE), GPUS["h100"], server_memory(shaped(config, SHAPE), 80.0), tokens)
    assert math.isclose(seconds, 100 * model_parameters(SHAPE) * 2 / 4 / 3.35e12, rel_tol=0.01)


def test_sync() -> None:
    plan = make_plan(shaped(recipe(), SHAPE))
    assert plan.sync_bytes == 2 * model_parameters(SHAPE)
    gathering = plan.sync_bytes * 3 / 4 / 450e9
    assert math.isclose(plan.sync.least, gathering + plan.sync_bytes / 50e9)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            "cluster.gpus_per_node=2",
            ["parallel.tensor=4 is more than cluster.gpus_per_node=2", "rollout.server_tensor_parallel=4 is more than"],
        ),
        ("cluster.gpu_memory_gib=20", ["a trainer rank needs", "95% of one H100 SXM 80 GB is 19.0 GiB"]),
        ("sglang.extra.mem_fraction_static=0.04", ["has room for 0 tokens", "one response takes 34816"]),
    ],
)
def test_what_does_not_fit_is_told_with_the_numbers(overrides: str, parts: list[str]) -> None:
    config = recipe(*overrides.split())
    found = list(check_machines(resolve(config))) or check_memory(resolve(config, HF_CONFIG))
    text = "\n".join(v.message for v in found)
    assert all(part in text for part in parts), text


def test_suggestions_fit_and_are_faster() -> None:
    config = recipe()
    present = make_plan(shaped(config, SHAPE))
    found = suggest(resolve(config, HF_CONFIG), present)
    assert found
    for s in found:
        changed = make_plan(shaped(recipe(*s.overrides), SHAPE))
        assert changed.fits
        assert changed.train.expected < present.train.expected
        fitting = recipe(*s.overrides)
        assert [
            *check_machines(resolve(fitting)),
            *check_memory(resolve(fitting, HF_CONFIG)),
            *check_unused(resolve(fitting)),
        ] == []
        assert changed.train == s.plan.train, "the overrides deliver what was promised"


def test_a_layout_that_does_not_fit_gets_one_that_does() -> None:
    config = recipe("parallel.tensor=1", "parallel.sequence=false", "parallel.data=16", "train.recompute=false")
    present = make_plan(shaped(config, SHAPE))
    assert not present.fits
    found = suggest(resolve(config, HF_CONFIG), present)
    assert found
    assert all(s.plan.fits for s in found)


@pytest.mark.parametrize(
    "settings", ["train.schedule=forwards_first rollout.max_response_tokens=8192", "slurm.rollout_nodes=0"]
)
def test_suggestions_pass_the_check(settings: str) -> None:
    """forwards_first does not support pipeline stages, which the fastest layouts have."""
    start = ["parallel.tensor=1", "parallel.sequence=false", "parallel.data=16", *settings.split()]
    config = recipe(*start)
    found = suggest(resolve(config, HF_CONFIG), make_plan(shaped(config, SHAPE)))
    assert found
    for s in found:
        changed = recipe(*start, *s.overrides)
        assert check_settings(resolve(changed, HF_CONFIG), num_gpus=32) == []
        assert check_placement(resolve(changed)) == []


def test_a_layout_must_fit_the_nodes() -> None:
    """With separate nodes for servers, a node takes eight trainer ranks; with shared nodes, four."""
    files, hf_config = ["recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/4x8-h200"], KNOWN_MODELS["Qwen3-32B-64k"]
    layout = ["parallel.tensor=8", "parallel.pipeline=1", "parallel.data=2"]
    assert accepts_layout(resolve(load_config(files, layout), hf_config), on_gpus=True)
    assert not accepts_layout(resolve(load_config(files, [*layout, "slurm.rollout_nodes=0"]), hf_config), on_gpus=True)


def test_a_server_beside_fewer_ranks_than_it_has_gpus() -> None:
    layout = ["parallel.data=2", "rollout.engine=sglang", "rollout.server_tensor_parallel=4", "model.dtype=bfloat16"]
    assert load_checked(["demo", "cluster.gpu=h100", *layout], elsewhere=True, memory=False).cluster.gpus_per_node == 8


def test_no_accepted_layout_splits_a_server_or_a_tensor_group() -> None:
    """The layouts are checked GPU by GPU, as place() spreads them."""
    base, accepted = recipe(), 0
    sizes = itertools.product((1, 2, 3), (6, 8), (1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3, 4, 6, 8))
    for nodes, gpus, tensor, data, servers, server_tensor in sizes:
        config = base.model_copy(
            update={
                "cluster": base.cluster.model_copy(update={"nodes": nodes, "gpus_per_node": gpus}),
                "parallel": base.parallel.model_copy(update={"tensor": tensor, "data": data, "num_ranks": None}),
                "rollout": base.rollout.model_copy(
                    update={"num_servers": servers, "server_tensor_parallel": server_tensor}
                ),
            }
        )
        found = check_settings(resolve(config), num_gpus=nodes * gpus)
        found += [
            *(check_placement(resolve(config)) if nodes > 1 else []),
            *check_machines(resolve(config)),
        ]
        if any(v.severity == "error" for v in found):
            continue
        accepted += 1
        placed = resolve(config).placement
        assert placed.ranks_per_node % tensor == 0, "a tensor-parallel group is on one machine"
        assert placed.ranks_per_node <= gpus
        last_gpu = 1 + placed.server(servers - 1)[-1].gpu
        assert last_gpu <= gpus, "each server has its GPUs on one machine"
    assert accepted > 100


@pytest.mark.parametrize("sharing", ["", "slurm.rollout_nodes=0"])
def test_groups_that_are_on_two_machines(sharing: str) -> None:
    """Check rank by rank, in the order of learner/parallel.py, on the trainer's own nodes and on nodes with servers."""
    base, seen = recipe(*sharing.split()), set()
    for tensor, context, data, pipeline in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        layout = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline, "num_ranks": None}
        config = base.model_copy(update={"parallel": base.parallel.model_copy(update=layout)})
        if any(v.severity == "error" for v in check_placement(resolve(config))):
            continue
        ranks = torch.arange(config.parallel.size).view(pipeline, data, context, tensor)
        node = ranks // resolve(config).placement.ranks_per_node
        for name, in_a_row, nodes_of_groups in (
            ("context", tensor * context, node.movedim(2, -1).reshape(-1, context)),
            ("data x context", tensor * context * data, node.permute(0, 3, 1, 2).reshape(-1, data * context)),
            ("pipeline", config.parallel.size, node.movedim(0, -1).reshape(-1, pipeline)),
        ):
            if nodes_of_groups.shape[1] > 1:
                are_apart = bool((nodes_of_groups != nodes_of_groups[:, :1]).any())
                assert work.spans_nodes(resolve(config).placement, in_a_row) == are_apart
                seen.add((name, are_apart))
    assert {("context", False), ("context", True), ("data x context", False), ("data x context", True)} <= seen
    assert ("pipeline", True) in seen


def test_what_goes_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of eight data ranks, on a node each, send hidden states but no gradients; on shared nodes, both."""
    stages = ["parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=2", "parallel.data=8"]

    def seconds(bytes_per_s: float, *more: str) -> float:
        monkeypatch.setattr(plan, "NETWORK_BYTES_PER_S", bytes_per_s)
        return make_plan(shaped(recipe(*stages, *more), SHAPE)).train.least

    # the bytes times (1/1e9 - 1/2e9)
    sent = [seconds(1e9, *more) - seconds(2e9, *more) for more in ([], ["slurm.rollout_nodes=0"])]
    tokens, config = 512 * (2048 + 32768), recipe(*stages)
    passes = 2 + work.num_scoring_passes(config, forwards_first=False)
    hidden = tokens / 8 * 3584 * 2 / 2 * passes  # bfloat16; one of two stages sends in each direction
    assert math.isclose(sent[0] * 2e9, hidden, rel_tol=1e-6)
    gradients = 2 * 2 * 7 / 8 * 4 * make_plan(shaped(config, SHAPE)).trainer.held.total  # two updates, float32
    assert math.isclose(sent[1] * 2e9, hidden + gradients, rel_tol=1e-6)


def test_tensor_ranks_send_their_share_to_the_next_stage_with_sequence_parallelism() -> None:
    tokens = StepTokens.of(recipe())
    both = ["parallel.tensor=2", "parallel.pipeline=4", "parallel.data=2"]
    split, whole = (
        work.pipeline_parallel_bytes(shaped(recipe(*both, f"parallel.sequence={on}"), SHAPE), tokens, 1)
        for on in ("true", "false")
    )
    assert whole == 2 * split == 3 * 3 / 4 * tokens.total / 2 * 3584 * 2
    chunks = recipe(*both, "parallel.sequence=false", "parallel.virtual_pipeline=7")
    assert work.pipeline_parallel_bytes(shaped(chunks, SHAPE), tokens, 1) == whole * (4 * 7 - 1) / 3
    assert work.pipeline_parallel_bytes(shaped(recipe(), SHAPE), tokens, 1) == 0


@pytest.mark.parametrize(
    ("model", "layout", "parts"),
    [  # GiB of weights in bfloat16, gradients in float32 and Adam's state
        ("Qwen3-30B-A3B", "tensor=1 data=8 expert=8", (9.6, 19.2, 42.7)),
        ("Qwen3-30B-A3B", "tensor=4 data=4 expert=8", (7.5, 15.0, 21.4)),
        ("Qwen3-235B-A22B", "tensor=4 pipeline=2 data=16 expert=32", (8.5, 17.0, 20.5)),
    ],
)
def test_memory_of_a_mixture_is_split_over_two_kinds_of_copies(
    model: str, layout: str, parts: tuple[float, ...]
) -> None:
    given = [f"parallel.{one}" for one in layout.split()]
    given += ["parallel.num_ranks=none", f"parallel.sequence={'false' if 'tensor=1' in layout else 'true'}"]
    memory = trainer_memory(shaped(recipe(*given, "optimizer.distributed=true"), model_shape(KNOWN_MODELS[model])))
    assert tuple(round(part / GIB, 1) for part in (memory.weights, memory.gradients, memory.optimizer)) == parts


def test_tokens_travel_to_their_experts_and_back() -> None:
    """Over 8 ranks with tensor=2: each of a rank's rows goes to 8 experts, 7 of 8 of them on other ranks."""
    shape = model_shape(KNOWN_MODELS["Qwen3-30B-A3B"])
    config = recipe("parallel.tensor=2", "parallel.sequence=true", "parallel.expert=8", "train.recompute=false")
    tokens = StepTokens.of(config)
    p = config.parallel
    rows = tokens.total / (p.tensor * p.context * p.data)
    crossings = 48 * (2 * config.train.epochs_per_step + 1)  # layers, in each pass
    assert work.expert_parallel_bytes(shaped(config, shape), tokens, 1) == 2 * rows * 8 * 7 / 8 * 2048 * 2 * crossings
    assert work.expert_parallel_bytes(shaped(config, SHAPE), tokens, 1) == 0
    held = Held(dense=1000, expert=100)
    copies, of_experts = p.data * p.context, p.tensor * p.context * p.data / 8
    summed = 2 * 4 * (1000 * (copies - 1) / copies + 100 * (of_experts - 1) / of_experts)
    assert work.gradient_bytes(config, held) == pytest.approx(summed)


def test_the_plan_of_a_mixture_says_what_a_token_uses_and_what_is_assumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["model.path=models/Qwen3-30B-A3B", "parallel.tensor=4", "parallel.expert=8", "parallel.sequence=true"]
    files = ["recipes/r1-distill-qwen-7b-32k", "algorithms/bapo", "clusters/4x8-h100"]
    assert main(["plan", *files, *given]) == 0
    told = capsys.readouterr().out
    assert "experts shared out over 8" in told
    assert "a token uses 3,353,032,704 of the model's 30,532,122,624 parameters" in told
    assert "a rank holds 3,623,878,656 in experts; memory for 25% more rows than an even load" in told


@pytest.mark.parametrize("model", ["recipes/qwen3-30b-a3b-32k", "recipes/qwen3.5-9b-32k"])
def test_the_plan_names_no_lever_that_the_model_refuses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = [model, "algorithms/bapo", "clusters/4x8-h100"]
    assert main(["check", *files]) == 0
    assert "precision.fp8" not in capsys.readouterr().out
    assert main(["check", *files, "precision/fp8"]) == 2


def test_the_plan_has_room_for_routes(capsys: pytest.CaptureFixture[str]) -> None:
    """48 layers x 8 experts: a byte for each in the trainer, four in SGLang, for every token of its cache."""
    given = ["model.path=models/Qwen3-30B-A3B", "parallel.tensor=4", "parallel.expert=8", "parallel.sequence=true"]
    given += ["parallel.pipeline=2", "parallel.data=2", "model.dtype=bfloat16"]
    shape = model_shape(KNOWN_MODELS["Qwen3-30B-A3B"])
    without, config = recipe(*given), recipe(*given, "model.replay_routes=true")
    before, memory = (trainer_memory(shaped(one, shape), stage=1, gpu_bytes=GPU_BYTES) for one in (without, config))
    num_tokens = before.batch // 64
    assert memory.batch == num_tokens * (64 + 24 * 8)
    assert memory.total == before.total + num_tokens * 24 * 8
    r = config.rollout
    num_groups = 2 * r.prompts_per_step
    made = make_plan(shaped(config, shape))
    assert made.rows_bytes == 2 * num_groups * r.samples_per_prompt * config.longest_trained * 384
    assert made.server.routes == made.server.kv_tokens * 48 * 8 * 4
    overlapped = recipe(*given, "model.replay_routes=true", "rollout.overlap=true", "rollout.max_staleness=11")
    num_updates = config.train.minibatches_per_step * config.train.epochs_per_step
    steps = 12 // num_updates
    assert make_plan(shaped(overlapped, shape)).rows_bytes == made.rows_bytes // num_groups * r.prompts_per_step * steps
    dense = make_plan(shaped(recipe(), SHAPE))
    assert dense.rows_bytes == dense.server.routes == 0
    files = ["recipes/r1-distill-qwen-7b-32k", "algorithms/bapo", "clusters/4x8-h100", "train.recompute=true"]
    for one, said in (
        (["model.replay_routes=true"], f"token rows {made.rows_bytes / 1e9:.1f} GB of memory on trainer rank 0"),
        ([], ""),
    ):
        assert main(["plan", *files, *given, *one]) == 0
        told = capsys.readouterr().out
        assert said in told if said else "token rows" not in told


def test_the_plan_has_room_for_likeliest_tokens_of_the_sampler() -> None:
    """Eight bytes for each in the memory of ranks and of rank 0, and one more pass of the output layer."""
    plain, config = (recipe("loss.name=reinforce", f"loss.center_top_k={top_k}") for top_k in (0, 16))
    before, memory = (trainer_memory(shaped(one, SHAPE), gpu_bytes=GPU_BYTES) for one in (plain, config))
    assert memory.batch == before.batch + before.batch // 64 * 16 * 8
    r, (without, made) = config.rollout, (make_plan(shaped(one, SHAPE)) for one in (plain, config))
    assert without.rows_bytes == 0
    assert made.rows_bytes == 2 * 2 * r.prompts_per_step * r.samples_per_prompt * r.max_response_tokens * 16 * 8
    assert made.flops > without.flops


def test_prompts_are_shared_where_that_saves_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    """A group of 8 at prompt : response of 1 : 1 leaves 0.56 of the tokens in one update, and 0.83 dealt to 8."""
    given = ["data.max_prompt_tokens=1024", "rollout.max_response_tokens=1024", "rollout.samples_per_prompt=8"]
    given += ["train.max_tokens_per_microbatch=16384", "train.recompute=false"]

    def share_of(*settings: str) -> float:
        plans = (
            make_plan(shaped(recipe(*given, *settings, f"train.share_prompts={on}"), SHAPE)) for on in ("true", "false")
        )
        shared, copied = plans
        assert shared.flops < copied.flops
        assert shared.trainer.total > copied.trainer.total, "keys are gathered"
        return shared.tokens.total / copied.tokens.total

    assert share_of("train.minibatches_per_step=1") == pytest.approx(9 / 16, abs=1e-3)
    assert share_of("train.minibatches_per_step=8") == pytest.approx((5.25 + 8) / 16, abs=1e-3)
    assert share_of("train.minibatches_per_step=8", "train.deal=groups") == pytest.approx(9 / 16, abs=1e-3)
    files = ["recipes/r1-distill-qwen-7b-32k", "algorithms/bapo", "clusters/4x8-h100", "train.recompute=true"]
    hybrid = model_shape(KNOWN_MODELS["Qwen3.5-9B"])
    for one, saves in ((given, True), ([*given, "data.max_prompt_tokens=64"], False)):
        assert shaped(recipe(*one), SHAPE).shares_prompts == saves
        assert not shaped(recipe(*one, "parallel.context=2"), SHAPE).shares_prompts
        assert not shaped(recipe(*one), hybrid).shares_prompts, "linear attention has copies"
        for more, is_named in (((), False), (("train.share_prompts=false",), saves)):
            assert main(["plan", *files, *one, *more]) == 0
            assert ("train.share_prompts=true" in capsys.readouterr().out) == is_named


BIG = ["recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h100"]
SMALL = ["recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/1x8-h100"]
OVERLAPPED = ("rollout.overlap=true", "rollout.max_staleness=8")


@pytest.mark.parametrize(
    ("files", "overrides", "factor"),
    [pytest.param(BIG, (), 0.8, marks=pytest.mark.slow), (SMALL, (), 1.0), (SMALL, OVERLAPPED, 1.0)],
    ids=["32B", "7B", "7B-overlapped"],
)
def test_the_best_split_shortens_the_step(files: list[str], overrides: tuple[str, ...], factor: float) -> None:
    config = load_config(files, overrides)
    hf_config = KNOWN_MODELS[Path(config.model.path).name]
    present = make_plan(shaped(config, model_shape(hf_config)))
    before, best = step_balance(config, present), best_split(resolve(config, hf_config))
    assert before is not None
    assert best is not None
    assert best.balance.step_s < factor / 0.9 * before.step_s  # within a tenth, the plainest wins
    assert best.plan.fits
    assert accepts_layout(resolve(best.run.config, hf_config), on_gpus=True)
    num_gpus = config.cluster.nodes * config.cluster.gpus_per_node
    assert best.run.placement.num_gpus == num_gpus
    for share in (best.balance.trainer_idle, best.balance.servers_idle):
        assert 0 <= share < 1


def test_each_side_waits_for_the_other_or_the_slower_one() -> None:
    shape = model_shape(KNOWN_MODELS["Qwen3-32B-64k"])
    for overrides, mode in (((), "synchronous"), (("rollout.abort_tail=true",), "partial"), (OVERLAPPED, "overlapped")):
        config = load_config(BIG, overrides)
        plan = make_plan(shaped(config, shape))
        found = step_balance(config, plan)
        assert found is not None
        assert plan.rollout is not None
        train_s, rollout_s = plan.train.expected, plan.rollout.expected
        busy_s = max(train_s, rollout_s) if mode == "overlapped" else train_s + rollout_s
        assert (found.mode, found.step_s) == (mode, busy_s + plan.sync.expected)
        assert found.trainer_idle == pytest.approx(1 - train_s / found.step_s)
        assert found.servers_idle == pytest.approx(1 - rollout_s / found.step_s)


def test_on_shared_gpus_the_sides_take_each_others_time() -> None:
    files = ["recipes/r1-distill-qwen-7b-8k", "algorithms/bapo"]
    for cluster, overrides, mode in (
        ("split", (), "synchronous"),
        ("split", OVERLAPPED, "overlapped"),
        ("turns", (), "synchronous"),
    ):
        run = planned(load_config([*files, f"clusters/1x8-h100-{cluster}"], overrides))
        plan = make_plan(run)
        found = step_balance(run.config, plan)
        assert found is not None
        assert plan.rollout is not None
        assert (found.mode, found.step_s) == (
            mode,
            plan.train.expected + plan.rollout.expected + plan.sync.expected + plan.moves_s,
        )
        assert (plan.moves_s > 0) == (cluster == "turns")


NAMES = {
    "a100": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-SXM-64GB"),
    "h100": ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5 80GB", "NVIDIA H100"),
    "h200": ("NVIDIA H200",),
    "h20": ("NVIDIA H20",),
    "b200": ("NVIDIA B200",),
    "b300": ("NVIDIA B300 SXM6 AC",),
    "gb200": ("NVIDIA GB200",),
    "l4": ("NVIDIA L4",),
    "l40s": ("NVIDIA L40S",),
    "a10": ("NVIDIA A10",),
    "a10g": ("NVIDIA A10G",),
    "a40": ("NVIDIA A40",),
    "a6000": ("NVIDIA RTX A6000", "RTX A6000"),
    "rtx3090": ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
    "rtx4090": ("NVIDIA GeForce RTX 4090",),
    "rtx5090": ("NVIDIA GeForce RTX 5090",),
}
OTHERS = (
    *("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H20-3e", "NVIDIA GH200 480GB", "NVIDIA GB300"),
    *("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA A10-24Q"),
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A30"),
    *(
        "NVIDIA L40",
        "NVIDIA L20",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX 4000 SFF Ada Generation",
        "NVIDIA H800",
    ),
    *("Quadro RTX 6000", "Tesla V100-SXM2-32GB", "Tesla T4", "AMD Instinct MI300X", "NVIDIA", "4090", ""),
)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_the_peak_of_a_gpu_is_in_the_table(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert kind_of(name) == kind
    assert device_peak_flops("bfloat16") == 2 * device_peak_flops("float32") == GPUS[kind].bf16_flops


@pytest.mark.parametrize("name", OTHERS)
def test_the_figures_of_another_gpu_are_not_assumed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert kind_of(name) is None
    assert device_peak_flops("bfloat16") is None


@settings(max_examples=200)
@given(
    st.sampled_from([(kind, name) for kind, names in NAMES.items() for name in names]),
    st.sampled_from(["PCIe", "NVL", "Ti", "SUPER", "D", "Max-Q", "Laptop GPU", "MIG 1g.10gb", "Ada", "24Q", "v2", "X"]),
    st.sampled_from([" ", "-", ""]),
)
def test_another_word_makes_another_gpu(named: tuple[str, str], word: str, joint: str) -> None:
    kind, name = named
    assert kind_of(f"{name}{joint}{word}") != kind


def test_every_kind_can_be_planned_for() -> None:
    """Each is a value of `cluster.gpu`, and its figures are of the same order as its neighbours'."""
    assert [*GPUS] == [*NAMES]
    for kind, gpu in GPUS.items():
        config = load_config(
            ["recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/1x8-h100"], [f"cluster.gpu={kind}"]
        )
        made = make_plan(shaped(config, SHAPE))
        assert made.gpu == gpu
        assert made.trainer_fits == (made.trainer.total <= 0.95 * gpu.memory_gib * GIB)
        assert ("precision.fp8" in " ".join(made.unused)) == (gpu.fp8_flops is not None)
        assert gpu.fp8_flops is None or 1.9 <= gpu.fp8_flops / gpu.bf16_flops <= 2.1, "dense, like bfloat16's"
        printed_gb = int(gpu.name.split()[-2])
        assert 0.9 < gpu.memory_gib * GIB / 1e9 / printed_gb < 1.08
        assert 80 < gpu.bf16_flops / gpu.memory_bytes_per_s < 450 or kind in ("h20", "a10g", "rtx3090")
    assert {kind for kind, gpu in GPUS.items() if gpu.has_multicast} == {"h100", "h200", "h20", "b200", "b300", "gb200"}


def test_the_peak_of_a_cpu_is_measured() -> None:
    measured = device_peak_flops("float32")
    assert measured is not None
    assert 1e8 < measured < 1e14


@pytest.mark.parametrize(
    ("present", "more"),
    [
        ("train.recompute=false", "train.recompute=true"),
        ('train.recompute_modules=["mlp"]', "train.recompute_modules=[]"),
        ("train.recompute_layers=2", f"train.recompute_layers={SHAPE.num_layers}"),
    ],
)
def test_more_recomputation_is_suggested_where_memory_is_short(present: str, more: str) -> None:
    config = recipe("train.recompute=true", present)
    totals = {change.overrides: change.total for change in lighter(resolve(config, HF_CONFIG), GPU_BYTES)}
    assert (more,) in totals
    if not config.train.recompute:
        parts = (more, 'train.recompute_modules=["core_attn", "mlp"]')
        assert totals[more,] < totals[parts]
        assert load_config([], [*parts]).train.recompute_modules == ("core_attn", "mlp")


def test_the_environment_s_answers_are_part_of_the_longest_sequence() -> None:
    limits = ["environment.max_turns=5", "environment.max_answer_tokens=100", "rollout.max_response_tokens=50"]
    turns, one = (load_config(["tool_demo"], [*limits, f"environment.kind={kind}"]) for kind in ("guess", "none"))
    assert one.longest_trained == one.longest_sequence == 16 + 50
    assert turns.longest_trained == turns.longest_sequence == 16 + 50 + 4 * 100
    assert microbatch_tokens(turns) > microbatch_tokens(one)
    assert StepTokens.of(turns).per_sequence == turns.longest_trained
    assert "turns      guess answers: at most 5 turns, answers of at most 100 tokens" in outline(resolve(turns))
    assert "turns " not in outline(resolve(one))
