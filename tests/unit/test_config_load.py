"""Merging, overriding and explaining configurations."""

import re
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from bapo_megatron.config.load import (
    dump_config,
    find_config,
    load_config,
    merge,
    parse_override,
    read_config,
    shipped_configs,
)
from bapo_megatron.config.paths import schema
from bapo_megatron.errors import ConfigError
from tests.loss_names import EVERY_LOSS, losses_with


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def message(files: Sequence[Path | str], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return str(caught.value).replace(f"{Path(files[0]).parent}/" if files else "\0", "")


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[bapo]\nrho_0 = 0.4", "no such setting: bapo.rho_0 (run.toml); did you mean bapo.rho0?"),
        ("[rollout]\ntensor = 2", "no such setting: rollout.tensor (run.toml)"),
        ("[train]\nclip_grad = 2", "no such setting: train.clip_grad (run.toml); did you mean optimizer.clip_grad?"),
        ("[optimiser]\nlr = 1.0", "no such setting: optimiser (run.toml); did you mean optimizer?"),
        ("[run]\nxyzzy = 1", "no such setting: run.xyzzy (run.toml)"),
        ("[train]\nnum_steps = '5'", 'train.num_steps must be a whole number, got "5" (run.toml)'),
        ("[train]\nnum_steps = true", "train.num_steps must be a whole number, got true (run.toml)"),
        ("[train]\nnum_steps = 1.5", "train.num_steps must be a whole number, got 1.5 (run.toml)"),
        ("[train]\nrecompute = 1", "train.recompute must be true or false, got 1 (run.toml)"),
        ("[train]\nnum_steps = 0", "train.num_steps must be above 0, got 0 (run.toml)"),
        ("[optimizer]\nbeta1 = 1", "optimizer.beta1 must be below 1, got 1 (run.toml)"),
        ("[optimizer]\nlr = 'fast'", 'optimizer.lr must be a number, got "fast" (run.toml)'),
        (
            "[loss]\nname = 'bap'",
            f"loss.name must be {EVERY_LOSS} or a path like "
            '"my_module:my_name", got "bap"; did you mean "bapo"? (run.toml)',
        ),
        *(
            (
                f"[loss]\nname = '{name}'",
                f"loss.name must be {EVERY_LOSS} or a path like "
                f'"my_module:my_name", got "{name}"; did you mean "{here}"? (run.toml)',
            )
            for name, here in (("ppo", "grpo"), ("PPO", "grpo"), ("a2c", "reinforce"))
        ),
        (
            "[advantage]\nkind = 'ppo'",
            'advantage.kind must be "grpo", "grpo_turns", "dr_grpo", "rloo", "max_rl", "gdpo", '
            '"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "n_step", "teacher" or a path '
            'like "my_module:my_name", got "ppo"; did you mean "gae"? (run.toml)',
        ),
        (
            "[loss]\nproximal = 'learner'\nimportance_kind = 'mask'\nimportance_floor = 1\nimportance_cap = 1",
            "loss.importance_floor must be below loss.importance_cap, as masks would leave no weight but exactly 1, "
            "got 1 (run.toml)",
        ),
        (
            "[loss]\nfilter_level = 'geometric'",
            "loss.filter_level needs loss.filter_floor and loss.filter_cap, such as 0.99 and 1.01, as it would filter "
            "nothing (run.toml)",
        ),
        (
            "[loss]\nfilter_level = 'token'\nfilter_floor = 1\nfilter_cap = 1",
            "loss.filter_floor must be below loss.filter_cap, as the filter would keep no ratio but exactly 1, got 1 "
            "(run.toml)",
        ),
        (
            "[loss]\nmean_over = 'sequences'",
            'loss.mean_over must be "tokens", "responses" or "budget", got "sequences" (run.toml)',
        ),
        ("[loss]\nimportance_floor = 1.5", "loss.importance_floor must be at most 1, got 1.5 (run.toml)"),
        (
            "[loss]\nname = 'cispo'\nclip_high = 0.28",
            "loss.clip_high must be at least 1, got 0.28 (run.toml); it bounds the ratio: for an epsilon of 0.28, set "
            "loss.clip_high=1.28",
        ),
        ("[loss]\nmax_drift = 0", "loss.max_drift must be above 0, got 0 (run.toml)"),
        (
            "[loss]\nname = 'm2po'\nmax_second_moment = 0",
            "loss.max_second_moment must be above 0, got 0 (run.toml)",
        ),
        (
            "[loss]\nclip_low = 0.7\nname = 'm2po'",
            f'loss.clip_low is not a setting of loss.name="m2po", but of {losses_with("clip_low")} (run.toml)',
        ),
        (
            "[loss]\nclip_high = 1.3",
            f'loss.clip_high is not a setting of loss.name="bapo", but of {losses_with("clip_high")} (run.toml)',
        ),
        (
            "[loss]\nname = 'sft'\ndual_clip = 3",
            f'loss.dual_clip is not a setting of loss.name="sft", but of {losses_with("dual_clip")} (run.toml)',
        ),
        (
            "[loss]\nname = 'grpo'\nclip_hihg = 2",
            "no such setting: loss.clip_hihg (run.toml); did you mean loss.clip_high?",
        ),
        (
            "[slurm]\npartition = 'gpu'",
            "no such setting: slurm.partition (run.toml); did you mean slurm.options (any other option of sbatch, such "
            'as ["--partition=NAME"])?',
        ),
        ("[model]\npath = 7", "model.path must be text in quotes, got 7 (run.toml)"),
        ("rollout = 5", "rollout must be a table, got 5 (run.toml)"),
        ("[rollout]\nurls = 'http://x'", 'rollout.urls must be a list, got "http://x" (run.toml)'),
        (
            "[bapo]\nlow = {stop = 1.2}",
            "bapo.low.stop must be at most 1, as it bounds the ratio from below, got 1.2 (run.toml)",
        ),
        (
            "[run]\nname = 'a b'",
            'run.name must match ^[A-Za-z0-9][A-Za-z0-9._-]*$, got "a b" (run.toml)',
        ),
    ],
)
def test_each_mistake_is_explained(tmp_path: Path, toml: str, expected: str) -> None:
    assert message([write(tmp_path, toml)]) == expected


def test_all_mistakes_come_at_once_with_their_sources(tmp_path: Path) -> None:
    first = write(tmp_path, "[train]\nnum_steps = -1\n[loss]\nname = 'x'", "first.toml")
    second = write(tmp_path, "[loss]\nname = 'y'", "second.toml")
    lines = message([first, second], "bapo.rho_0=1", "nonsense").splitlines()
    assert sorted(lines) == [
        f'loss.name must be {EVERY_LOSS} or a path like "my_module:my_name", got "y" (second.toml)',
        "no such setting: bapo.rho_0 (override bapo.rho_0=1); did you mean bapo.rho0?",
        "override 'nonsense' is not of the form section.key=value, such as optimizer.lr=3e-4",
        "train.num_steps must be above 0, got -1 (first.toml)",
    ]


def test_unreadable_files(tmp_path: Path) -> None:
    names = ", ".join(sorted({re.sub("/.*", "/...", name) for name in shipped_configs()}))
    advice = f"give a TOML file or a shipped configuration: {names} (docs/recipes.md)"
    assert message([tmp_path / "no.toml"]) == f"configuration no.toml does not exist; {advice}"
    for name in ("folder", "deep.toml"):
        (tmp_path / name).mkdir()
        assert message([tmp_path / name]) == f"configuration {name} is a folder; {advice}"
    assert message([write(tmp_path, "[run\n")]).startswith("run.toml is not valid TOML: ")
    assert "line 1" in message([write(tmp_path, "[run\n")])
    assert load_config([write(tmp_path, "\ufeff[train]\nnum_steps = 7\n")]).train.num_steps == 7, "a byte order mark"


def test_a_misspelt_file_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "mine.toml")
    assert message([tmp_path / "mien.toml"]).endswith("does not exist; did you mean mine.toml?")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean mine\.toml\?"):
        load_config(["minetoml"])
    with pytest.raises(ConfigError, match=r"did you mean demo\?"):
        load_config(["dmo"])
    with pytest.raises(ConfigError, match=r"nope\.toml does not exist; give a TOML file"):
        load_config(["nope.toml"])
    with pytest.raises(ConfigError, match="does not exist; give a TOML file"):
        load_config(["x" * 300 + "/y"])


def test_later_sources_win_table_by_table(tmp_path: Path) -> None:
    first = write(tmp_path, "[train]\nnum_steps = 1\nminibatches_per_step = 4\n[optimizer]\nlr = 1.0", "first.toml")
    second = write(tmp_path, "[train]\nnum_steps = 2\nepochs_per_step = 3", "second.toml")
    train = load_config([first, second], ["train.epochs_per_step=5", "train.epochs_per_step=6"]).train
    assert (train.num_steps, train.minibatches_per_step, train.epochs_per_step) == (2, 4, 6)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optimizer.lr=3e-4", 3e-4),
        ("train.recompute=true", True),
        ("loss.name=grpo", "grpo"),
        ("rollout.urls=['a', 'b']", ["a", "b"]),
        ("run.name=2024", "2024"),
        ('run.name="2024"', "2024"),
        ("data.path=a=b.jsonl", "a=b.jsonl"),
        ("bapo.low={start=0.5}", {"start": 0.5}),
        ("data.options.min_terms=3", 3),
    ],
)
def test_override_values(text: str, value: object) -> None:
    assert parse_override(text) == (tuple(text.partition("=")[0].split(".")), value)


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", "rollout.urls=[1", 'run.name="x'])
def test_malformed_overrides(text: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        parse_override(text)


def test_override_below_a_list_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "[bapo]\nlow = [0.5, 0.8, 0.1]")
    assert message([file], "bapo.low.stop=0.9") == (
        "cannot set bapo.low.stop: bapo.low was set as a whole; override bapo.low instead"
    )


def test_options_of_another_prompt_source_are_dropped(tmp_path: Path) -> None:
    chains = write(tmp_path, "[data]\nsource = 'chains'\noptions = { min_terms = 4 }\nmax_prompt_tokens = 9")
    programs = write(tmp_path, "[data]\nsource = 'programs'", "programs.toml")
    for config in (load_config([chains, programs]), load_config([chains], ["data.source=programs"])):
        assert (config.data.source, config.data.options, config.data.max_prompt_tokens) == ("programs", {}, 9)
    overrides = ["data.options={num_examples=4}", "data.source=programs"]  # in this order, too
    assert load_config([chains], overrides).data.options == {"num_examples": 4}
    assert load_config([chains], ["data.source=chains"]).data.options == {"min_terms": 4}


def test_none_unsets_what_can_be_unset() -> None:
    config = load_config([], ["checkpoint.interval_steps=none", "data.path=none", "run.name=none"])
    assert config.checkpoint.interval_steps is None
    assert config.data.path is None
    assert config.run.name == "none"
    assert message([], "train.num_steps=none") == (
        'train.num_steps must be a whole number, got "none" (override train.num_steps=none)'
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["checkpoint.interval_steps=none", "rollout.tokens_per_round=7"],
        ["bapo.preset=paper", "bapo.high.stop=2.5", "megatron.extra={a = 1}", "data.options.x.y=[1, 'b']"],
        ["rollout.urls=['http://127.0.0.1:1']", 'data.system_prompt=say "hi" \\ é', "optimizer.lr=1e-7"],
    ],
)
def test_dump_loads_back_equal(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config([], overrides)
    assert load_config([write(tmp_path, dump_config(config))]) == config


def test_shipped_configs_load_by_name() -> None:
    assert {"demo", "guess_demo", "hybrid_demo", "moe_demo", "smollm2_135m", "tool_demo"} <= set(shipped_configs())
    assert load_config(["demo"]) == load_config([find_config("demo")])


tables = st.recursive(
    st.integers(), lambda below: st.dictionaries(st.sampled_from("abc"), below, min_size=1, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


def flat(table: dict, prefix: tuple = ()) -> dict:
    return {
        p: v
        for k, x in table.items()
        for p, v in (flat(x, (*prefix, k)) if isinstance(x, dict) else {(*prefix, k): x}).items()
    }


@given(base=tables, top=tables)
def test_merge_keeps_the_top_and_only_what_it_leaves_alone(base: dict, top: dict) -> None:
    base_before, top_before = flat(base), flat(top)
    merged = flat(merge(tomllib.loads(tomli_w.dumps(base)), top))
    assert {p: merged[p] for p in top_before} == top_before
    clashes = [p for p in base_before if any(p[: len(q)] == q or q[: len(p)] == p for q in top_before)]
    assert {p: v for p, v in merged.items() if p not in top_before} == {
        p: v for p, v in base_before.items() if p not in clashes
    }


LISTS = """
[data]
[[data.sources]]
name = "easy"
options = { max_terms = 4 }
weight = 3
[[data.sources]]
name = "mine"
path = "mine.jsonl"
[eval]
interval_steps = 5
[[eval.sets]]
name = "aime-24"
path = "aime.parquet"
format = "math"
samples_per_prompt = 16
max_response_tokens = 100
"""


def test_lists_of_tables_are_read_and_written_back(tmp_path: Path) -> None:
    file = tmp_path / "lists.toml"
    file.write_text(LISTS)
    config = load_config([file])
    assert [(one.name, one.source, one.weight) for one in config.data.sources] == [
        ("easy", "chains", 3.0),
        ("mine", "jsonl", 1.0),  # it has a path
    ]
    assert [(one.name, one.source, one.num_prompts) for one in config.eval.sets] == [("aime-24", "jsonl", 64)]
    assert list(config.prompt_sources) == ["data.sources.easy", "data.sources.mine"]
    assert list(config.eval_sets) == ["eval.sets.aime-24"]
    assert config.prompt_files == {"data.sources.mine.path": "mine.jsonl", "eval.sets.aime-24.path": "aime.parquet"}
    assert config.longest_sequence == 512 + 512
    file.write_text(dump_config(config))
    assert load_config([file]) == config


def test_without_lists_there_is_one_source_and_one_set_without_a_name() -> None:
    config = load_config(
        [], ["data.source=jsonl", "data.path=a", "data.format=math", "eval.path=b", "eval.num_prompts=3"]
    )
    assert config.prompt_sources == {"data": config.data}
    (one,) = config.eval_sets.values()
    assert (one.name, one.source, one.path, one.format, one.num_prompts) == ("", "jsonl", "b", "math", 3)
    assert one.max_response_tokens is None
    assert config.prompt_files == {"data.path": "a", "eval.path": "b"}
    assert config.with_prompts_of(config.data) == config


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('eval.sets=[{name="a b"}]', 'eval.sets.0.name must match ^[A-Za-z0-9][A-Za-z0-9_-]*$, got "a b"'),
        ("eval.sets=[{num_prompts=3}]", "eval.sets.0.name is missing"),
        ('eval.sets=[{name="a"},{name="a"}]', 'eval.sets must have different names; "a" is there twice'),
        ('data.sources=[{name="a-b"},{name="a_b"}]', 'names that differ in more than "-" and "_", not "a-b" and "a_b"'),
        ("eval.sets=3", "eval.sets must be a list, got 3"),
        ('eval.sets=["x"]', 'eval.sets.0 must be a table, got "x"'),
        ('eval.sets=[{name="a",samples=3}]', "no such setting: eval.sets.0.samples (override"),
        ('eval.sets=[{name="a",samples=3}]', "did you mean eval.sets.0.samples_per_prompt?"),
        ('eval.sets=[{name="a",bogus=3}]', "no such setting: eval.sets.0.bogus"),
        ('data.sources=[{name="a",weight=-1}]', "data.sources.0.weight must be above 0, got -1"),
        ('data.sources=[{name="a",weight=0}]', "data.sources.0.weight must be above 0, got 0"),
        ('data.sources=[{name="a",weight=inf}]', "data.sources.0.weight must be"),
    ],
)
def test_a_wrong_entry_is_named(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [setting])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


TABLES = [".".join(path) for path, field in schema().items() if typing.get_origin(field.annotation) is dict]


@pytest.mark.parametrize("setting", [name for name in TABLES if name not in ("data.fields", "loss.options")])
def test_an_empty_table_empties_the_files_table(tmp_path: Path, setting: str) -> None:
    section, key = setting.split(".")
    value = {
        "judges": '{a = "math"}',
        "weights": "{a = 2.0}",
        "environment": '{A = "1"}',
        "urls_by_source": '{a = ["b"]}',
        "path_by_source": '{a = "b"}',
    }.get(key, "{a = 1}")
    file = write(tmp_path, f"[{section}]\n{key} = {value}")
    assert getattr(getattr(load_config([file]), section), key) != {}
    emptied = read_config([file], [f"{setting}={{}}"])
    assert (getattr(getattr(emptied.config, section), key), emptied.violations) == ({}, ())
    assert not [name for name in emptied.given if name.startswith(f"{setting}.")], "nothing below it is left"
    again = load_config([file], [f"{setting}={{}}", f"{setting}={value}"])
    assert again == load_config([file]), "a later override fills it"


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("rollout.engine=vLLM", 'vLLM is not supported, set rollout.engine="sglang"'),
        ("data.source=csv", 'a file is "jsonl", whether it has JSON lines, a JSON list, CSV or Parquet'),
        ("reward.kind=judges/math.py:judge", 'write "judges.math:judge"'),
        ("reward.kind=./math.py", 'write "math:my_name"'),
        ('chat_template_kwargs={"a":false}', "no such setting: chat_template_kwargs"),
        ('chat_template_kwargs={"a":false}', "did you mean data.template_options?"),
        ('lora_config={"r":8}', "[lora] has rank, alpha, targets and init_from"),
        ('data.template_options={"a":false}', "the value is not TOML"),
        ("environment.options.x=[1", "the value is not TOML"),
    ],
)
def test_what_to_do_is_said(override: str, advice: str) -> None:
    assert advice in message([], override)


def test_yaml_is_told_apart_from_torn_toml(tmp_path: Path) -> None:
    assert message([write(tmp_path, "data:\n  train_files: a\n", "verl.yaml")]).startswith(
        "verl.yaml is YAML, and a configuration is TOML; write it as TOML with our settings"
    )
