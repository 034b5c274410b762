"""Settings of the update that contradict each other or do nothing."""

import json
from typing import Any

import pytest

from bapo_megatron.assets import demo_model_path, shipped_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.resolved import resolve


def messages(severity: str, **sections: Any) -> list[str]:
    config = Config.model_validate({"train": {"minibatches_per_step": 2}, **sections})
    return [v.message for v in check_settings(resolve(config)) if v.severity == severity]


@pytest.mark.parametrize(
    ("severity", "sections", "part"),
    [
        ("warning", {"optimizer": {"min_lr_ratio": 0.1}}, "optimizer.min_lr_ratio=0.1 has no effect"),
        ("warning", {"optimizer": {"total_updates": 9}}, "optimizer.total_updates=9 has no effect"),
        (
            "error",
            {"optimizer": {"schedule": "cosine", "warmup_updates": 200}},
            "warmup_updates=200 leaves nothing of the 200 updates",
        ),
        (
            "warning",
            {"loss": {"name": "grpo"}, "bapo": {"rho0": 0.3, "scope": "microbatch"}},
            'bapo.rho0=0.3, bapo.scope="microbatch" have no effect without loss.name="bapo"; set that, or leave them',
        ),
        (
            "warning",
            {"bapo": {"preset": "paper", "scope": "fixed", "order": "low_first"}},
            'bapo.order="low_first" has',
        ),
        ("warning", {"optimizer": {"warmup_updates": 100_000}}, "is longer than the run of 200 updates"),
        (
            "warning",
            {"eval": {"path": "nope.jsonl"}},
            'eval.path="nope.jsonl" has no effect without eval.interval_steps',
        ),
        ("warning", {"critic": {"path": "x"}}, 'critic.path="x" has no effect without advantage.kind="gae"'),
        ("warning", {"bapo": {"scope": "microbatch"}}, "depend on train.max_tokens_per_microbatch="),
        (
            "warning",
            {"bapo": {"preset": "wide", "scope": "exact"}},
            'the bounds stay at 0.9 and 3; set bapo.preset="default", or set bapo.scope',
        ),
        (
            "warning",
            {"bapo": {"low": {"stop": 0.6}}},
            "no room: the bounds stay at 0.6 and 1.2; raise bapo.low.stop, or set",
        ),
        (
            "warning",
            {"bapo": {"order": "low_first", "high": {"stop": 1.2}}},
            "the bounds stay at 0.6 and 1.2; raise bapo.high.stop, or set",
        ),
        ("warning", {"loss": {"name": "sft"}, "monitor": {"token_profile": True}}, "token_profile=true has no effect"),
        ("warning", {"loss": {"name": "grpo", "clip_low": 0.2}}, "for an epsilon of 0.2, set loss.clip_low=0.8"),
        ("warning", {"loss": {"name": "gspo", "clip_low": 3e-4}}, "for an epsilon of 0.0003, set loss.clip_low=0.9997"),
        ("warning", {"train": {"max_tokens_per_microbatch": 1023}}, "set it to 1024 or more, such as 4096 for four"),
        (
            "warning",
            {"train": {"minibatches_per_step": 128}},
            "each of the step's 128 sequences is an update of its own; set it to the step's sequences, divided by",
        ),
        (
            "warning",
            {"loss": {"name": "vespo"}, "train": {"minibatches_per_step": 128}, "parallel": {"data": 2}},
            'loss.name="vespo" weights or masks whole responses, and each update has one response',
        ),
        (
            "error",
            {"advantage": {"kind": "max_rl"}, "reward": {"overlong_penalty": 0.5, "overlong_buffer_tokens": 32}},
            'advantage.kind="max_rl" needs rewards of 0 and 1, and reward.overlong_penalty=0.5 makes others',
        ),
        ("error", {"loss": {"kl_target": 0.1}}, "set loss.kl_coef=0.1"),
        ("warning", {"loss": {"reference_path": "x"}}, 'loss.reference_path="x" has no effect without loss.kl_coef'),
        ("warning", {"loss": {"kl_coef": 0.1, "kl_estimator": "k1"}}, "adds noise"),
        ("error", {"advantage": {"kind": "teacher"}}, "needs teacher.path, the model to learn from, or"),
        (
            "error",
            {"advantage": {"kind": "gae"}, "teacher": {"path": "x"}, "loss": {"name": "grpo"}},
            'teacher.path with advantage.kind="gae": a critic values rewards',
        ),
        (
            "warning",
            {"advantage": {"kind": "teacher"}, "teacher": {"path": "x"}},
            'ends at its limits in nearly every update; set loss.name="grpo", whose bounds are fixed, or bapo.scope',
        ),
        (
            "warning",
            {"teacher": {"path": "x"}, "loss": {"name": "gspo", "proximal": "learner"}, "rollout": {"top_p": 0.9}},
            "they make each advantage too low; set rollout.top_p=1",
        ),
        (
            "warning",
            {"teacher": {"path": "x"}, "loss": {"name": "grpo"}, "rollout": {"keep_group": "informative"}},
            "which teach as much as others with rollout.samples_per_prompt=8 and a teacher",
        ),
        (
            "error",
            {
                "advantage": {"kind": "teacher"},
                "teacher": {"path": "x"},
                "reward": {"kind": "none"},
                "eval": {"interval_steps": 5},
            },
            'reward.kind="none" gives no reward, and eval.interval_steps measures rewards; leave it out, or name a',
        ),
        (
            "error",
            {
                "advantage": {"kind": "teacher"},
                "teacher": {"path": "x"},
                "reward": {"kind": "none"},
                "rollout": {"keep_group": "informative"},
            },
            'reward.kind="none" gives no reward, and rollout.keep_group="informative" leaves out groups of',
        ),
        (
            "error",
            {"teacher": {"urls": ["http://x:1"]}, "rollout": {"temperature": 0.7}, "loss": {"name": "grpo"}},
            "rollout.temperature=0.7 with teacher.urls: servers score at temperature 1, whatever they are asked for",
        ),
        (
            "error",
            {
                "teacher": {"hint": "{prompt} 1"},
                "data": {"chat_template": True},
                "environment": {"kind": "agent"},
                "loss": {"name": "grpo"},
            },
            'teacher.hint replaces the words of a row, and with environment.kind="agent" a program writes the prompts',
        ),
        (
            "error",
            {"advantage": {"kind": "gae"}, "teacher": {"hint": "{prompt} 1"}, "loss": {"name": "grpo"}},
            'teacher.hint with advantage.kind="gae": a critic values rewards',
        ),
        (
            "error",
            {"teacher": {"urls": ["x:1"]}, "loss": {"name": "grpo"}},
            'teacher.urls: "x:1" is not the URL of a server; write it like',
        ),
        (
            "warning",
            {
                "teacher": {"urls": ["http://x:1/"]},
                "rollout": {"engine": "attach", "urls": ["http://x:1"]},
                "loss": {"name": "grpo"},
            },
            "teacher.urls: http://x:1 is a server of the policy, too",
        ),
        (
            "error",
            {"teacher": {"urls_by_source": {"sums": ["http://x:1"]}}, "loss": {"name": "grpo"}},
            "teacher.urls_by_source names servers for entries of data.sources, and there are none; set teacher.urls",
        ),
        (
            "error",
            {
                "data": {"sources": [{"name": "sums", "source": "chains"}, {"name": "words", "source": "chains"}]},
                "teacher": {"urls_by_source": {"sums": ["http://x:1"], "words": []}},
                "loss": {"name": "grpo"},
            },
            "teacher.urls_by_source has no server for words of data.sources; name one: teacher.urls_by_source.words",
        ),
        (
            "error",
            {"teacher": {"path_by_source": {"sums": "x"}}, "loss": {"name": "grpo"}},
            "teacher.path_by_source names models for entries of data.sources, and there are none; set teacher.path",
        ),
        (
            "error",
            {
                "data": {"sources": [{"name": "sums", "source": "chains"}, {"name": "words", "source": "chains"}]},
                "teacher": {"path_by_source": {"sums": "x"}},
                "loss": {"name": "grpo"},
            },
            "teacher.path_by_source has no model for words of data.sources; name one: teacher.path_by_source.words",
        ),
        (
            "error",
            {
                "data": {"sources": [{"name": "sums", "source": "chains"}]},
                "teacher": {"urls_by_source": {"sums": ["http://x:1"], "sum": ["http://x:2"]}},
                "loss": {"name": "grpo"},
            },
            "teacher.urls_by_source has sum, which data.sources does not name; leave it out; the sources are sums",
        ),
        (
            "warning",
            {"train": {"share_prompts": True}, "parallel": {"context": 2}},
            "train.share_prompts=true has no effect without parallel.context=1",
        ),
        (
            "warning",
            {"train": {"deal": "groups", "minibatches_per_step": 1}},
            'train.deal="groups" has no effect without train.minibatches_per_step above 1',
        ),
        (
            "error",
            {
                "train": {"deal": "groups", "minibatches_per_step": 16},
                "rollout": {"prompts_per_step": 12, "samples_per_prompt": 8},
            },
            'train.minibatches_per_step=16 with train.deal="groups": the groups of 12 prompts make at most as many '
            "mini-batches; set train.minibatches_per_step=12",
        ),
        ("warning", {"teacher": {"api_key": "x"}}, 'teacher.api_key="x" has no effect without teacher.urls'),
        ("warning", {"teacher": {"timeout_s": 5}}, "teacher.timeout_s=5.0 has no effect without teacher.urls or"),
        ("warning", {"teacher": {"coef": 2.0}}, "teacher.coef=2.0 has no effect without teacher.path, teacher.urls or"),
        (
            "error",
            {"teacher": {"top_k": 8}},
            "teacher.top_k=8 needs teacher.path: the trainer finds the teacher's likeliest tokens",
        ),
        (
            "warning",
            {"teacher": {"path": "x", "divergence": "forward"}, "loss": {"name": "grpo"}},
            'teacher.divergence="forward" has no effect without teacher.top_k',
        ),
        (
            "warning",
            {"advantage": {"kind": "teacher"}, "teacher": {"path": "x", "top_k": 8}},
            "there are no advantages for the search of [bapo]; set loss.name",
        ),
        (
            "warning",
            {
                "advantage": {"kind": "teacher"},
                "teacher": {"path": "x"},
                "loss": {"name": "grpo"},
                "reward": {"scale": 2, "clip": 1.0},
            },
            "reward.scale=2.0, reward.clip=1.0 have no effect without an advantage.kind that reads rewards, such as",
        ),
        ("warning", {"reward": {"scale": 2}}, "reward.scale=2 does nothing"),
        ("warning", {"reward": {"running_std": True}}, "reward.running_std does nothing"),
        (
            "warning",
            {"reward": {"scale": 2}, "advantage": {"kind": "rloo", "whiten_batch": True}},
            "leave one of them out",
        ),
    ],
)
def test_told(severity: str, sections: dict[str, Any], part: str) -> None:
    (message,) = messages(severity, **sections)
    assert part in message


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"name": "grpo", "clip_low": 0.5}},
        {"loss": {"name": "cispo", "clip_low": 0.0}},
        {"bapo": {"preset": "wide"}},
        {"bapo": {"high": {"stop": 1.2}}},
        {"train": {"max_tokens_per_microbatch": 1024}},
        {"train": {"max_tokens_per_microbatch": 512}, "parallel": {"context": 2}},
        {"train": {"minibatches_per_step": 64}},
        {"rollout": {"prompts_per_step": 1, "samples_per_prompt": 2}, "train": {"minibatches_per_step": 1}},
    ],
)
def test_values_in_our_units_are_not_questioned(sections: dict[str, Any]) -> None:
    assert messages("warning", **sections) == []


def test_a_limit_of_a_micro_batch_is_only_questioned_if_it_was_given() -> None:
    config = Config.model_validate({"rollout": {"max_response_tokens": 32_768}})
    found = [v.message for v in check_settings(resolve(config), given=["rollout.max_response_tokens"])]
    assert not [message for message in found if "max_tokens_per_microbatch" in message]


def test_a_reference_needs_the_vocabulary_of_the_policy_and_fits_its_layout() -> None:
    policy = json.loads((demo_model_path() / "config.json").read_text())
    loss = {"kl_coef": 0.1, "reference_path": "x"}
    config = Config.model_validate({"parallel": {"tensor": 2}, "loss": loss, "train": {"minibatches_per_step": 2}})
    policy |= {"max_position_embeddings": 4096}
    assert check_settings(resolve(config, policy), reference=ModelFacts(policy)) == []
    other = policy | {"vocab_size": 7, "num_key_value_heads": 1}
    found = [v.message for v in check_settings(resolve(config, policy), reference=ModelFacts(other))]
    assert len(found) == 2
    assert found[0].startswith("loss.reference_path='x' has a vocabulary of 7 tokens, but the policy's has")
    assert found[1].startswith("loss.reference_path='x': parallel.tensor=2 does not divide 1 key-value head")


@pytest.mark.parametrize(
    ("scorer", "settings"),
    [
        ("reference", {"loss": {"reference_path": "x", "kl_coef": 0.1}}),
        ("teacher", {"teacher": {"path": "x"}, "advantage": {"kind": "teacher"}, "loss": {"name": "grpo"}}),
        ("critic", {"advantage": {"kind": "gae"}, "critic": {"path": "x"}}),
    ],
)
def test_a_model_that_scores_needs_positions_for_the_longest_sequence(scorer: str, settings: dict[str, Any]) -> None:
    policy = json.loads((demo_model_path() / "config.json").read_text()) | {"max_position_embeddings": 4096}
    config = Config.model_validate(settings)

    def found(positions: int) -> list[str]:
        model = policy | {"max_position_embeddings": positions}
        others: dict[str, Any] = {} if scorer == "teacher" else {scorer: ModelFacts(model)}
        return [
            v.message for v in check_settings(resolve(config, policy, {"x": model}), **others) if v.severity == "error"
        ]

    assert found(1024) == []
    (short,) = found(1023)
    assert "='x' has max_position_embeddings=1023, and the longest sequence that it may score has 1024 tokens" in short


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": {"proximal": "learner"}},
            'loss.proximal="learner" with loss.center_top_k=8: the ratio compares with the learner at the start of the '
            'step, and the sampler\'s likeliest tokens say nothing of that; set loss.proximal="behaviour", or '
            "loss.center_top_k=0",
        ),
        (
            {"rollout": {"top_p": 0.9, "max_response_tokens": 64}},
            "rollout.top_p or rollout.top_k with loss.center_top_k=8: servers return the likeliest tokens before the "
            "cut; set rollout.top_p=1 and leave rollout.top_k out, or loss.center_top_k=0",
        ),
        (
            {"teacher": {"path": "x", "top_k": 4}},
            "teacher.top_k=4 with loss.center_top_k=8: an update reads one list of tokens at each place; leave one of "
            "them out",
        ),
        (
            {"loss": {"center_top_k": 1024}},
            "loss.center_top_k=1024, but the vocabulary has 1001 tokens; set it to 1000 or less",
        ),
        ({}, None),
    ],
)
def test_score_centering_needs_the_samplers_own_distribution(settings: dict[str, Any], message: str | None) -> None:
    policy = json.loads((demo_model_path() / "config.json").read_text()) | {"vocab_size": 1001}
    loss = {"name": "cispo", "center_top_k": 8} | settings.get("loss", {})
    run = resolve(Config.model_validate(settings | {"loss": loss}), policy, {"x": policy})
    found = [v.message for v in check_settings(run) if "center_top_k" in v.message]
    assert found == ([message] if message else [])


def test_a_teachers_likeliest_tokens_are_on_one_rank_and_leave_others() -> None:
    """Rewards keep the search, and what rollout.top_p cuts away does not bend a divergence."""
    policy = json.loads((demo_model_path() / "config.json").read_text()) | {"vocab_size": 1001}

    def found(top_k: int, tensor: int) -> list[str]:
        settings = {
            "teacher": {"path": "x", "top_k": top_k},
            "parallel": {"tensor": tensor},
            "rollout": {"top_p": 0.9, "max_response_tokens": 64},
        }
        run = resolve(Config.model_validate(settings), policy, {"x": policy})
        return [v.message for v in check_settings(run)]

    fitting = found(500, 2)
    assert found(1000, 1) == found(501, 2) == fitting
    assert not any("search of [bapo]" in message or "too low" in message for message in fitting)
    of_all, of_rank = ([one for one in found(*case) if "teacher.top_k" in one] for case in ((1001, 1), (502, 2)))
    begin = ", but of the vocabulary of 1001 tokens at most "
    assert of_all == [f"teacher.top_k=1001{begin}1000 can be chosen; set it to 1000 or less"]
    assert of_rank == [f"teacher.top_k=502{begin}501 can be chosen on each of 2 ranks; set it to 501 or less"]


def test_a_teacher_may_have_more_rows_than_the_policy_and_not_fewer() -> None:
    policy = json.loads((demo_model_path() / "config.json").read_text()) | {"max_position_embeddings": 4096}
    config = Config.model_validate(
        {
            "advantage": {"kind": "teacher"},
            "teacher": {"path": "x"},
            "parallel": {"tensor": 2},
            "loss": {"name": "grpo"},
        }
    )

    def found(teacher: dict[str, Any]) -> list[str]:
        return [v.message for v in check_settings(resolve(config, policy, {"x": teacher}))]

    assert found(policy) == found(policy | {"vocab_size": 1000}) == []
    small, heads = found(policy | {"vocab_size": 7, "num_key_value_heads": 1})
    assert small.startswith("teacher.path='x' has a vocabulary of 7 tokens, but the policy's has")
    assert heads.startswith("teacher.path='x': parallel.tensor=2 does not divide 1 key-value head")


def test_a_frozen_model_that_computes_each_copy_of_a_prompt_is_told() -> None:
    policy = json.loads((demo_model_path() / "config.json").read_text()) | {"max_position_embeddings": 4096}
    hybrid = json.loads((shipped_model_path("hybrid") / "config.json").read_text()) | {"max_position_embeddings": 4096}

    def found(of_policy: dict[str, Any], teacher: dict[str, Any], **train: Any) -> list[str]:
        sections = {"teacher": {"path": "x"}, "advantage": {"kind": "teacher"}, "loss": {"name": "grpo"}}
        sections |= {"rollout": {"max_response_tokens": 64}, "train": train}
        run = resolve(Config.model_validate(sections), of_policy, {"x": teacher})
        return [v.message for v in check_settings(run) if v.severity == "warning" and "prompt once" in v.message]

    (told,) = found(policy, hybrid)
    assert told.startswith("teacher.path='x' has linear attention: its passes take longer")
    assert not found(policy, policy)
    assert not found(policy, hybrid, share_prompts=False)
    assert not found(hybrid, hybrid)


def test_each_teacher_is_checked_by_the_setting_that_names_it() -> None:
    """Two sources have one teacher, which is checked once; a top_k that no rank has is one message for all."""
    policy = json.loads((demo_model_path() / "config.json").read_text()) | {"max_position_embeddings": 4096}
    names = {"a": "good", "b": "small", "c": "short", "d": "small"}
    config = Config.model_validate(
        {
            "data": {"sources": [{"name": name, "source": "chains"} for name in names]},
            "teacher": {"path_by_source": names, "top_k": 99},
            "loss": {"name": "grpo"},
        }
    )
    teachers = {"good": policy, "small": policy | {"vocab_size": 7}, "short": policy | {"max_position_embeddings": 99}}
    short, small, top_k = [v.message for v in check_settings(resolve(config, policy, teachers))]
    assert short.startswith("teacher.path_by_source.c='short' has max_position_embeddings=99, and the longest")
    assert small.startswith("teacher.path_by_source.b='small' has a vocabulary of 7 tokens, but the policy's has")
    assert top_k.startswith("teacher.top_k=99, but of the vocabulary of 16 tokens at most 15 can be chosen")


def test_a_critic_needs_a_vocabulary_like_the_policys_and_fits_the_layout() -> None:
    policy = json.loads((demo_model_path() / "config.json").read_text()) | {"max_position_embeddings": 4096}
    hybrid = json.loads((shipped_model_path("hybrid") / "config.json").read_text())
    config = Config.model_validate({"advantage": {"kind": "gae"}, "critic": {"path": "x"}})

    def found(critic: dict[str, Any]) -> list[str]:
        violations = check_settings(resolve(config, policy), critic=ModelFacts(critic))
        return [v.message for v in violations if v.severity == "error"]

    assert found(policy) == found(policy | {"vocab_size": 1000}) == []
    (small,) = found(policy | {"vocab_size": 7})
    assert small.startswith("critic.path='x' has a vocabulary of 7 tokens, but the policy's has")
    (linear,) = found(hybrid | {"max_position_embeddings": 4096})
    assert "critic.path='x': advantage.kind=\"gae\": a critic is not supported with linear attention" in linear


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"optimizer": {"schedule": "linear", "warmup_updates": 199, "min_lr_ratio": 0.1}},
        {"optimizer": {"schedule": "cosine", "warmup_updates": 200, "total_updates": 400}},
        {"loss": {"kl_coef": 0.1, "kl_target": 0.05, "reference_path": "x"}},
        {"loss": {"name": "grpo"}, "monitor": {"token_profile": True}},
        {"reward": {"running_std": True, "clip": 5}},
        {"reward": {"scale": 2}, "advantage": {"kind": "dr_grpo"}},
    ],
)
def test_fine(sections: dict[str, Any]) -> None:
    assert messages("error", **sections) == messages("warning", **sections) == []
