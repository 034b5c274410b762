"""Checks across sections: each names the numbers and something that works."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bapo_megatron.config.engines import ENGINES
from bapo_megatron.config.load import load_config
from bapo_megatron.errors import ConfigError, plural
from bapo_megatron.hf.shape import model_shape, rotary_frequencies
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.explain import outline
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.resolved import resolve

HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("scaling", "num_tokens", "remedy"),
    [
        (YARN, 8192, ', or set "max_position_embeddings": 8192 in config.json: its YaRN is made for'),
        (
            {"rope_type": "yarn", "factor": 2.0},
            4096,
            '"max_position_embeddings": 4096 and, next to the factor, "original_max_position_embeddings": 2048',
        ),
        (YARN, 8193, None),
        ({"rope_type": "linear", "factor": 8.0}, 4096, None),
    ],
)
def test_a_context_that_yarn_is_made_for_names_the_way_there(
    scaling: dict[str, Any], num_tokens: int, remedy: str | None
) -> None:
    wanted = [f"rollout.max_response_tokens={num_tokens - 48}", "data.max_prompt_tokens=48"]
    (message,) = (
        m
        for m in messages(*wanted, hf_config=HF_CONFIG | {"rope_scaling": scaling})
        if "positions" in m or "max_pos" in m
    )
    assert ("in config.json" in message) == (remedy is not None)
    assert remedy is None or remedy in message
    if remedy is not None:
        longer = {
            "max_position_embeddings": num_tokens,
            "rope_scaling": {"original_max_position_embeddings": 2048} | scaling,
        }
        assert not any("max_pos" in m for m in messages(*wanted, hf_config=HF_CONFIG | longer))
        before, after = (rotary_frequencies(model_shape(HF_CONFIG | c)) for c in ({"rope_scaling": scaling}, longer))
        assert torch.equal(before[0], after[0])
        assert before[1] == after[1]


def test_the_activation_that_sglang_computes_must_be_the_models() -> None:
    gemma = HF_CONFIG | {"model_type": "gemma", "head_dim": 64, "hidden_act": "gelu"}
    (message,) = (m for m in messages("rollout.engine=sglang", hf_config=gemma) if "activation" in m)
    assert "the model has gelu_pytorch_tanh, but SGLang computes the exact GELU" in message
    assert 'set rollout.engine="embedded"' in message
    assert not any("activation" in m for m in messages(hf_config=gemma))


def messages(*overrides: str, hf_config: dict[str, Any] = HF_CONFIG) -> list[str]:
    return [v.message for v in check_settings(resolve(load_config([], overrides), hf_config))]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            "parallel.num_ranks=8 parallel.pipeline=2 parallel.data=1",
            ["num_ranks=8", "1 x 2 x 1 x 1 = 2", "parallel.data=4"],
        ),
        ("parallel.num_ranks=3 parallel.pipeline=2", ["num_ranks=3", "set parallel.num_ranks=2"]),
        ("parallel.virtual_pipeline=2", ["virtual_pipeline=2", "parallel.pipeline above 1", "virtual_pipeline=1"]),
        ("parallel.pipeline=5 parallel.virtual_pipeline=4", ["virtual_pipeline=4", "6 layers", "1, 2, 3 or 6"]),
        ("train.schedule=forwards_first parallel.pipeline=2", ["pipeline=2", 'schedule="auto"']),
        ("optimizer.distributed=true", ["parallel.data x context", "optimizer.distributed=false"]),
        ("parallel.sequence=true", ["parallel.sequence=true", "parallel.tensor above 1"]),
        ("parallel.tensor=2", ["9 attention heads", "3 key-value heads", "1 or 3"]),
        ("parallel.pipeline=4", ["30 layers", "1, 2, 3, 5"]),
        ("train.minibatches_per_step=7", ["16 x 8 = 128", "set train.minibatches_per_step=8"]),
        ("train.minibatches_per_step=64 parallel.data=3", ["128 / 64 = 2", "data=3", "minibatches_per_step=32"]),
        ("rollout.samples_per_prompt=1", ["at least 2", "which has a critic"]),
        ("rollout.tokens_per_round=600", ["600", "512"]),
        ("rollout.groups_in_flight=3", ["groups_in_flight=3", "set rollout.groups_in_flight=16"]),
        ("rollout.engine=attach", ["rollout.urls"]),
        ("sync.timeout_s=200 parallel.data=2", ["sync.timeout_s=150", "parallel.timeout_s=800"]),
        ("rollout.server_tensor_parallel=3", ["server_tensor_parallel=3", 'rollout.engine="sglang"']),
        ("rollout.engine=sglang rollout.server_tensor_parallel=2", ["num_attention_heads=9", "=1"]),
        ("rollout.engine=sglang sglang.extra.port=1", ["sglang.extra.port", "attach"]),
        ("data.source=jsonl", ["data.path"]),
        ("data.source=reasoning_gym", ["data.dataset"]),
        ('data.sources=[{name="a"}] data.path=p.jsonl', ["data.path=p.jsonl names a file besides data.sources"]),
        ('data.sources=[{name="a",source="jsonl"}]', ['data.sources.a.source="jsonl" needs data.sources.a.path']),
        ('data.sources=[{name="a",source="chains",path="p"}]', ['data.sources.a.path=p has no effect with source="ch']),
        ('data.sources=[{name="a"}] data.size=5', ["data.size=5 has no effect without data.sources=[]"]),
        ('data.sources=[{name="a"}] eval.interval_steps=5', ["with data.sources needs eval.sets"]),
        ('reward.kind=code data.sources=[{name="a"}]', ["data.sources.a.source='chains' has none"]),
        ('eval.interval_steps=5 eval.sets=[{name="a",source="reasoning_gym"}]', ["needs eval.sets.a.dataset"]),
        ('eval.sets=[{name="a"}]', ["eval.sets=", "has no effect without eval.interval_steps"]),
        (
            'eval.interval_steps=5 eval.sets=[{name="a"}] eval.path=p eval.num_prompts=3',
            ['eval.path="p", eval.num_prompts=3 have no effect without eval.sets=[]'],
        ),
        (
            'eval.interval_steps=5 eval.sets=[{name="a",max_response_tokens=1600}]',
            ["of eval.sets = 2112", "max_position_embeddings=2048", "set max_response_tokens=1536 there"],
        ),
        ("rollout.max_staleness=2 train.minibatches_per_step=4", ["max_staleness=2", "up to 3", "max_staleness=3"]),
        ("rollout.max_response_tokens=2000", ["512 + 2000 = 2512", "2048", "data.max_prompt_tokens=48"]),
        ("rollout.max_response_tokens=4096", ["max_prompt_tokens=1024 and rollout.max_response_tokens=1024"]),
        ("reward.overlong_penalty=1 reward.overlong_buffer_tokens=600", ["600", "512", "buffer_tokens=102"]),
        ("loss.name=gspo bapo.rho0=0.4", ["bapo.rho0=0.4 has no effect", 'loss.name="bapo"', "read whole responses"]),
        ("loss.name=gmpo bapo.scope=lagged", ['bapo.scope="lagged" has no effect', 'loss.name="bapo"', "gmpo"]),
        (
            "loss.importance_kind=mask loss.importance_level=sequence",
            ['importance_kind="mask"', 'without loss.proximal="learner" (the ratio', "leave them out"],
        ),
        ("loss.importance_cap=3", ["loss.importance_cap=3.0 has no effect", 'loss.proximal="learner"']),
        (
            "loss.filter_level=geometric loss.filter_cap=1.01",
            ['loss.filter_level="geometric" has no effect', 'without loss.proximal="learner" (the filter'],
        ),
        ("loss.filter_cap=1.01", ["loss.filter_cap=1.01 has no effect", 'loss.filter_level="geometric"']),
        ("reward.overlong_buffer_tokens=60", ["has no effect without reward.overlong_penalty=1"]),
        ("reward.overlong_penalty=1 rollout.truncated=mask", ['truncated="mask"', "overlong_penalty=1", '"keep"']),
        ("rollout.keep_group=informative rollout.samples_per_prompt=2", ["most groups", "samples_per_prompt=8"]),
        ("rollout.keep_group=informative train.entropy_coef=0.01", ["entropy_coef=0.01", 'keep_group="all"']),
        ("reward.kind=code", ["tests", "'chains'", 'data.source="jsonl"']),
        ("environment.max_turns=9", ['environment.max_turns=9 has no effect without environment.kind="calculator"']),
        ("environment.kind=guess reward.kind=math", ['reward.kind="math" has no effect', "gives the rewards itself"]),
        ("environment.kind=guess environment.max_turn_tokens=600", ["max_turn_tokens=600", "max_response_tokens=512"]),
        ("environment.kind=guess environment.max_answer_tokens=500", ["of 1024 tokens with 4 - 1", "2524", "=2048"]),
        ("critic.lr=1e-4", ["critic.lr=0.0001 has no effect", 'advantage.kind="gae" or "n_step"']),
        ("advantage.gamma=0.9", ["advantage.gamma=0.9 has no effect", '"grpo_turns" or "reinforce_plus_plus"']),
        ("advantage.kind=gae critic.warmup_steps=100", ["warmup_steps=100", "never change", "train.num_steps"]),
        ("advantage.kind=gae rollout.keep_group=informative", ["samples_per_prompt=8", 'keep_group="all"']),
        ("advantage.kind=gae advantage.whiten_batch=true", ['over responses, and advantage.kind="gae" over tokens']),
        (
            "advantage.kind=reinforce_plus_plus_baseline advantage.whiten_batch=true",
            ["whiten_batch=true whitens over responses", "over tokens", "leave it out"],
        ),
        (
            "advantage.kind=reinforce_plus_plus rollout.keep_group=informative",
            ["teach as much as others", 'keep_group="all"'],
        ),
        (
            "advantage.kind=reinforce_plus_plus_baseline rollout.samples_per_prompt=1",
            ["an advantage compares the responses to one prompt"],
        ),
        ("advantage.kind=reinforce_plus_plus_baseline reward.scale=2", ["divides by the standard deviation of the"]),
        ("advantage.kind=gdpo", ["needs rewards with parts, and the judge gives one number", "set reward.judges"]),
        ("advantage.kind=gdpo reward.judges.a=math reward.clip=2", ["reward.clip=2.0 has no effect", "the parts of a"]),
        (
            "advantage.kind=gdpo reward.judges.a=math reward.overlong_penalty=1",
            ["reward.overlong_penalty=1.0 has no effect", 'advantage.kind="grpo"'],
        ),
        ("advantage.kind=gdpo reward.judges.a=math reward.scale=2", ["reward.scale=2 does nothing"]),
        ("advantage.kind=n_step rollout.truncated=mask", ['truncated="mask"', "does not learn"]),
        (
            "advantage.kind=gae rollout.samples_per_prompt=1 rollout.keep_group=informative",
            ["are all there are", 'keep_group="all"'],
        ),
    ],
)
def test_one_violation(overrides: str, parts: list[str]) -> None:
    (found,) = messages(*overrides.split())
    for part in parts:
        assert part in found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("parallel.expert=3 parallel.data=6", "parallel.expert=3 does not divide 128 experts; it can be 1 or 2"),
        (
            "parallel.expert=8 parallel.data=2 parallel.context=2",
            "parallel.expert=8 does not divide parallel.tensor x context x data = 1 x 2 x 2 = 4; it can be 1, 2 or 4",
        ),
        (
            "parallel.tensor=2",
            "experts with parallel.tensor=2 need parallel.sequence=true; set that, or parallel.tensor=1",
        ),
        (
            "parallel.pipeline=4",
            "parallel.pipeline=4 does not divide 94 layers; parallel.pipeline can be 1, 2, 47 or 94, or set "
            "parallel.last_stage_layers=22",
        ),
        (
            "parallel.pipeline=4 parallel.last_stage_layers=20",
            "parallel.last_stage_layers=20 leaves 74 layers of 94 for the other 3 stages of parallel.pipeline=4, which "
            "cannot share them evenly; set it to 22",
        ),
        (
            "parallel.last_stage_layers=20",
            "parallel.last_stage_layers=20 needs parallel.pipeline above 1; leave it out",
        ),
        (
            "parallel.pipeline=4 parallel.last_stage_layers=22 parallel.virtual_pipeline=4",
            "parallel.virtual_pipeline=4 does not divide the 22 layers of a stage; it can be 1 or 2",
        ),
        (
            "parallel.data=2 parallel.expert=2 megatron.extra.expert_tensor_parallel_size=2",
            "megatron.extra.expert_tensor_parallel_size follows from model and layout; use parallel.expert",
        ),
        (
            "megatron.extra.moe_router_topk=4",
            "megatron.extra.moe_router_topk follows from model and layout; use the config.json of model.path",
        ),
        (
            "advantage.kind=gae",
            'advantage.kind="gae": a critic is not supported with experts; set advantage.kind="grpo"',
        ),
        (
            "model.replay_routes=true train.recompute=true train.recompute_modules=['mlp']",
            'model.replay_routes=true, but train.recompute_modules with "mlp" recomputes experts without the layer '
            'that has their routes; leave "mlp" out, or recompute whole layers',
        ),
        (
            "model.replay_routes=true megatron.extra.moe_router_fusion=true",
            "model.replay_routes=true, but Megatron's fused router chooses experts itself; leave [megatron.extra] "
            "moe_router_fusion out",
        ),
    ],
)
def test_one_violation_of_a_mixture(overrides: str, message: str) -> None:
    assert messages(*overrides.split(), hf_config=KNOWN_MODELS["Qwen3-235B-A22B"]) == [message]


def test_layouts_of_mixtures_that_fit() -> None:
    for layout in (
        "parallel.tensor=4 parallel.sequence=true parallel.expert=32 parallel.data=8 parallel.pipeline=2",
        "parallel.pipeline=4 parallel.last_stage_layers=22 parallel.virtual_pipeline=2",
        "parallel.last_stage_layers=94",
        "parallel.tensor=4 parallel.sequence=true",
    ):
        assert messages(*layout.split(), hf_config=KNOWN_MODELS["Qwen3-235B-A22B"]) == []


def test_what_experts_need_or_forbid_beside_the_layout() -> None:
    assert messages("parallel.expert=2", "parallel.data=2") == [
        "parallel.expert=2 shares out experts, and the model has none; set parallel.expert=1"
    ]
    assert messages("model.replay_routes=true") == [
        "model.replay_routes=true, but llama models have no routes; leave it out"
    ]
    eight_bit = messages("precision.fp8=hybrid", "model.dtype=bfloat16", hf_config=KNOWN_MODELS["Qwen3-30B-A3B"])
    assert 'precision.fp8="hybrid" is not supported with experts; set precision.fp8="off"' in eight_bit
    odd = KNOWN_MODELS["Qwen3-30B-A3B"] | {"moe_intermediate_size": 770}
    split = ("parallel.tensor=4", "parallel.sequence=true")
    assert messages(*split, hf_config=odd) == [
        "parallel.tensor=4 does not divide 770 feed-forward rows; parallel.tensor can be 1 or 2, or set parallel.expert"
    ]
    assert messages(*split, "parallel.expert=4", hf_config=odd) == []


@pytest.mark.parametrize("is_written", [True, False])
def test_servers_split_the_heads_of_linear_attention(is_written: bool) -> None:
    """The number of key heads may be left to transformers' default."""
    text = KNOWN_MODELS["Qwen3.5-27B"]["text_config"] | {"model_type": "qwen3_5_text"}
    hf_config = {key: value for key, value in text.items() if is_written or key != "linear_num_key_heads"}
    found = messages("rollout.engine=sglang", "rollout.server_tensor_parallel=3", hf_config=hf_config)
    (message,) = [message for message in found if "server_tensor_parallel" in message]
    assert message == (
        "rollout.server_tensor_parallel=3 does not divide the model's linear_num_key_heads=16, "
        "intermediate_size=17408, num_key_value_heads=4; set rollout.server_tensor_parallel=2"
    )


@pytest.mark.parametrize(
    ("change", "ranks", "problem"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "num_key_value_heads=6; set rollout.server_tens"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 12, None),  # two ranks have the same keys and values
        ({"intermediate_size": 1534, "num_attention_heads": 8, "num_key_value_heads": 8}, 4, "intermediate_size=1534"),
        ({"model_type": "smollm3", "num_attention_heads": 16, "num_key_value_heads": 4}, 8, "num_key_value_heads=4"),
        ({"model_type": "smollm3", "num_attention_heads": 16, "num_key_value_heads": 4}, 4, None),
    ],
)
def test_servers_split_heads_and_feed_forward_rows(change: dict[str, Any], ranks: int, problem: str | None) -> None:
    found = messages(
        "rollout.engine=sglang",
        f"rollout.server_tensor_parallel={ranks}",
        hf_config=HF_CONFIG | {"hidden_size": 768} | change,
    )
    told = [message for message in found if "does not divide" in message]
    assert len(told) == (problem is not None)
    assert all(f"rollout.server_tensor_parallel={ranks} does not divide the model's {problem}" in one for one in told)


def test_defaults_are_fine_and_violations_add_up() -> None:
    assert messages() == []
    assert len(messages("parallel.tensor=2", "train.minibatches_per_step=7", "data.source=jsonl")) == 3


def test_advice_works() -> None:
    assert messages("train.minibatches_per_step=8") == []
    assert messages("train.minibatches_per_step=32", "parallel.data=3") == []
    assert messages("rollout.max_response_tokens=2000", "data.max_prompt_tokens=48") == []


def test_shaping_that_makes_no_sense_only_warns() -> None:
    for overrides in (
        ["reward.overlong_buffer_tokens=60"],
        ["rollout.keep_group=informative", "train.entropy_coef=0.1"],
    ):
        (found,) = check_settings(resolve(load_config([], overrides)))
        assert found.severity == "warning"
    assert messages("rollout.keep_group=informative", "rollout.truncated=mask") == []


def test_a_critic_needs_no_groups() -> None:
    assert messages("advantage.kind=gae", "rollout.samples_per_prompt=1", "critic.lr=1e-4") == []


def test_turns_may_be_discounted() -> None:
    assert messages("advantage.kind=grpo_turns", "advantage.gamma=0.9") == []


def test_reinforce_plus_plus_needs_no_groups_and_may_discount() -> None:
    assert messages("advantage.kind=reinforce_plus_plus", "rollout.samples_per_prompt=1", "advantage.gamma=0.9") == []


def test_gdpo_takes_parts_from_judges_from_a_judge_of_ones_own_or_from_an_environment() -> None:
    for given in ('reward.judges={a="math"}', "reward.weights={a=1}", "environment.kind=my_module:my_step"):
        assert not [m for m in messages("advantage.kind=gdpo", given) if "needs rewards with parts" in m]


def test_overlap_on_shared_cores_warns() -> None:
    config = load_config([], ["rollout.overlap=true", "rollout.max_staleness=7"])
    (found,) = check_settings(resolve(config))
    assert found.severity == "warning"
    assert "share the cores" in found.message
    assert check_settings(resolve(config), num_gpus=8) == []
    elsewhere = load_config([], ["rollout.overlap=true", "rollout.max_staleness=7", 'cluster.gpu="h100"'])
    assert not any("share the cores" in other.message for other in check_settings(resolve(elsewhere)))


def test_bfloat16_warns_on_a_cpu_only() -> None:
    config = load_config([], ["model.dtype=bfloat16"])
    (found,) = check_settings(resolve(config))
    assert found.severity == "warning"
    assert check_settings(resolve(config), num_gpus=8) == []


def test_a_run_in_bfloat16_does_not_start_without_a_gpu() -> None:
    config = load_config([], ["model.dtype=bfloat16"])
    (found,) = check_settings(resolve(config), starts_here=True)
    assert found.severity == "error"
    assert check_settings(resolve(config), starts_here=True, num_gpus=8) == []


def test_one_of_a_kind_is_singular() -> None:
    text = outline(
        resolve(load_config([], ["train.num_steps=1", "rollout.prompts_per_step=1", "rollout.tokens_per_round=1"]))
    )
    assert "run: 1 step, 1 optimizer update\n" in text
    assert " 1 rank = tensor 1" in text
    assert "1 prompt x 8 samples = 8 sequences" in text
    assert "1 mini-batch of 8 sequences x 1 epoch = 1 a step" in text
    assert "at most 1 micro-batch of 8192 tokens" in text
    assert "1 embedded engine, 1 group in flight, partial rollout 1 token a round" in text
    assert [plural(2, noun) for noun in ("rank", "process", "mini-batch")] == [
        "2 ranks",
        "2 processes",
        "2 mini-batches",
    ]
    assert plural(20000, "token", ",") == "20,000 tokens"


def test_summary_has_the_arithmetic() -> None:
    text = outline(resolve(load_config([], ["train.minibatches_per_step=4", "parallel.pipeline=3", "parallel.data=2"])))
    assert "6 ranks = tensor 1 x pipeline 3 x context 1 x data 2" in text
    assert "16 prompts x 8 samples = 128 sequences" in text
    assert "4 mini-batches of 32 sequences" in text


@pytest.mark.parametrize(
    ("settings", "num_gpus", "message"),
    [
        (
            ("rollout.engine=sglang", "rollout.num_servers=2", "sglang.extra.attention_backend=triton"),
            2,
            "1 trainer rank and 2 SGLang servers x 1 GPU need 3",
        ),
        (("parallel.tensor=2",), 1, "2 trainer ranks need 2 GPUs, and 1 is visible"),
    ],
)
def test_each_rank_and_server_needs_a_gpu_of_its_own(settings: tuple[str, ...], num_gpus: int, message: str) -> None:
    config = load_config([], list(settings))
    (violation,) = check_settings(resolve(config), num_gpus=num_gpus)
    assert message in violation.message
    assert check_settings(resolve(config), num_gpus=num_gpus + 1) == []
    assert check_settings(resolve(config)) == []


def test_sglang_on_gpus_gets_float32_only_with_an_attention_of_the_users_choice() -> None:
    on_gpus, other = "rollout.engine=sglang", "sglang.extra.attention_backend=triton"
    (violation,) = check_settings(resolve(load_config([], [on_gpus])), num_gpus=2)
    assert 'has no kernels for float32; set model.dtype="bfloat16"' in violation.message
    for settings in ([on_gpus, "model.dtype=bfloat16"], [on_gpus, other], []):
        assert check_settings(resolve(load_config([], settings)), num_gpus=2) == []


@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://h:0", "http://:30000", "h:30000", "ftp://h:1", "http://[::1"]
)
def test_urls_that_cannot_be(url: str) -> None:
    attach = ["rollout.engine=attach", f'rollout.urls=["http://[::1]:30000", "https://node3", "{url}"]']
    assert messages(*attach) == [
        f'rollout.urls: "{url}" is not the URL of a server; write it like "http://127.0.0.1:30000"',
    ]


@pytest.mark.parametrize("setting", ["rollout.urls", "teacher.urls"])
@pytest.mark.parametrize("user", ["me:secret", ":secret", "secret"])
def test_a_password_in_a_url_is_refused_and_not_shown(setting: str, user: str) -> None:
    attach = ["rollout.engine=attach", 'rollout.urls=["http://h:1"]', f'{setting}=["https://{user}@node3"]']
    learns = ['advantage.kind="teacher"', "loss.name=grpo"] if setting == "teacher.urls" else []
    assert messages(*attach, *learns) == [
        f"{setting}: the URL of node3 has a password, which logs and run.dir would show; leave it out, and set "
        f"{setting.partition('.')[0]}.api_key to a file with the server's key"
    ]


@pytest.mark.parametrize("value", ["high", "0", "0.0", "1.5", "true", '"0.8"'])
def test_a_share_of_memory_is_between_0_and_1(value: str) -> None:
    (message,) = messages("rollout.engine=sglang", f"sglang.extra.mem_fraction_static={value}")
    assert "is not a share of a GPU's memory" in message
    for fine in ("0.8", "false"):  # false leaves the share to SGLang, or to the plan of a shared GPU
        assert messages("rollout.engine=sglang", f"sglang.extra.mem_fraction_static={fine}") == []


@pytest.mark.parametrize("value", ["high", "0", "-1", "inf", "nan", "true", '"0.8"'])
def test_a_ratio_of_memory_is_positive(value: str) -> None:
    (message,) = messages("rollout.engine=sglang", f"sglang.extra.mamba_full_memory_ratio={value}")
    assert "is not memory for states / memory for keys and values; set it above 0, such as 0.9, or" in message
    assert messages("rollout.engine=sglang", "sglang.extra.mamba_full_memory_ratio=1.5") == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.engine=sglang", "rollout.top_p=0.9"], "rollout.top_p=0.9: the SGLang server returns log-probs of"),
        (["rollout.engine=sglang", "rollout.top_k=4097"], "rollout.top_k, such as rollout.top_k=1024"),
        (["rollout.engine=sglang", "eval.interval_steps=1", "eval.top_p=0.9"], "set eval.top_k, such as"),
        (["rollout.top_k=3"], 'set loss.proximal="learner" to clip only changes'),
        (["rollout.top_p=0.9", "loss.name=gspo"], 'set loss.proximal="learner" to clip only changes'),
    ],
)
def test_a_cut_needs_its_log_probs_and_another_ratio(settings: list[str], message: str) -> None:
    assert any(message in found for found in messages(*settings))


@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.top_p=0.9", "loss.proximal=learner", "train.minibatches_per_step=2"],
        ["rollout.engine=sglang", "rollout.top_p=0.9", "rollout.top_k=1024", "loss.name=sft"],
        ["rollout.engine=attach", 'rollout.urls=["http://127.0.0.1:1"]', "rollout.top_k=9", "loss.name=sft"],
        ["eval.interval_steps=1", "eval.top_p=0.9"],
    ],
)
def test_a_cut_that_is_fine(settings: list[str]) -> None:
    assert messages(*settings) == []


def test_an_engine_without_log_probs_of_a_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "embedded", replace(ENGINES["embedded"], cuts=False))
    (message,) = messages("rollout.top_p=0.9", "loss.name=sft")
    assert message.startswith("rollout.top_p=0.9: the embedded engine does not return log-probs of the distribution")


@pytest.mark.parametrize("setting", ["top_p=0", "top_p=1.01", "top_p=nan", "top_k=0", "top_k=-1", "top_k=1.5"])
@pytest.mark.parametrize("section", ["rollout", "eval"])
def test_a_cut_that_cannot_be(section: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{setting.partition('=')[0]}"):
        load_config([], [f"{section}.{setting}"])


def test_a_hang_timeout_leaves_time_for_a_weight_update() -> None:
    config = load_config([], ["rollout.engine=sglang", "rollout.hang_timeout_s=10"])
    (violation,) = check_settings(resolve(config))
    assert violation.severity == "warning"
    assert f"rollout.hang_timeout_s={config.sync.timeout_s:g}" in violation.message
