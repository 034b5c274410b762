"""The page of all settings, and the names of other frameworks for them."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from write_coming_from_page import PAGE as COMING_FROM
from write_coming_from_page import filled_page

from bapo_megatron.config.coming_from import Hint, frameworks, meant_by
from bapo_megatron.config.load import load_config
from bapo_megatron.config.losses import LOSSES
from bapo_megatron.config.page import settings_page
from bapo_megatron.config.paths import meant_setting, schema

ROOT = Path(__file__).parents[2]
OTHERS = tomllib.loads(Path(__file__).with_name("other_frameworks.toml").read_text(encoding="utf-8"))


def test_the_page_has_every_setting() -> None:
    page = settings_page()
    shown = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    sections = set(re.findall(r"^##+ \[+([\w.]+)\]", page, re.MULTILINE))
    assert {path[0] for path in schema() if len(path) > 1} <= sections
    assert {path[1] for path in schema() if len(path) > 1} <= shown


def test_the_table_of_losses_has_every_built_in_loss() -> None:
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    table = page.partition("| `loss.name` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(LOSSES)


def test_every_setting_says_what_it_is() -> None:
    bare = [line for line in settings_page().splitlines() if line.startswith("| `") and "|  |" in line]
    assert [line.split("`")[1] for line in bare] == []


def test_the_tables_of_other_frameworks_are_current() -> None:
    text = COMING_FROM.read_text(encoding="utf-8")
    assert text == filled_page(text), "run: python scripts/write_coming_from_page.py"


def test_every_hint_can_be_followed() -> None:
    """A hint names a setting that exists, with a value that is valid, and other settings that exist in its remark."""
    settings = {".".join(path) for path in schema()}
    for hint in {hint for names in frameworks().values() for hint in names.values()}:
        name, _, value = hint.setting.partition("=")
        assert name in settings | {""}, hint
        if value:
            load_config(["demo"], ["loss.name=grpo", "data.source=jsonl", hint.setting])
        sections = "|".join({path[0] for path in schema()})
        named = re.findall(rf"(?<![\w.\[])(?:{sections})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*(?!\S*[*/(])", hint.remark)
        assert {one for one in named if one not in settings | THEIRS} == set(), hint


THEIRS = {"data.train_batch_size", "train.batch_size"}  # verl's, and OpenRLHF's


@pytest.mark.parametrize("framework", OTHERS)
def test_settings_of_typical_runs_are_answered(framework: str) -> None:
    wrong = {}
    for theirs, here in OTHERS[framework].items():
        hint = meant_setting(tuple(theirs.lstrip("-").replace("-", "_").split(".")))
        told = "" if hint is None else hint.setting or hint.remark
        is_right = told.startswith(here) if here and hint is not None and not hint.setting else told == here
        if not is_right:
            wrong[theirs] = told
    assert wrong == {}


@st.composite
def misspelt(draw: st.DrawFn) -> tuple[str, ...]:
    """A setting or section with a part left out, two parts written as one, or a letter wrong: ("bapohigh",)."""
    path = list(draw(st.sampled_from([*schema(), *{known[:-1] for known in schema() if len(known) > 1}])))
    if len(path) > 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(path) - 2))
        path[at : at + 2] = [draw(st.sampled_from(["", "_", ".", "-"])).join(path[at : at + 2])]
    at = draw(st.integers(0, len(path) - 1))
    name, letter = path[at], draw(st.integers(0, len(path[at])))
    path[at] = name[:letter] + draw(st.sampled_from(["", "a", "_", "."])) + name[letter + draw(st.booleans()) :]
    return tuple(path[draw(st.integers(0, len(path) - 1)) :])


@given(misspelt())
def test_a_misspelt_setting_is_answered_with_one_that_exists(path: tuple[str, ...]) -> None:
    hint = meant_setting(path)
    assert hint is None or not hint.setting or tuple(hint.setting.partition("=")[0].split(".")) in schema()


def test_a_section_inside_another_may_lack_its_dot() -> None:
    assert meant_setting(("bapohigh",)) == Hint("bapo.high")


UNITS = {
    "epsilon": "a bound of the ratio, 0.8 for 0.2",
    "--eps-clip-high": "a bound of the ratio, 1.28 for 0.28",
    "actor_rollout_ref.actor.clip_ratio_low": "a bound of the ratio, 0.8 for 0.2",
    "loss_fn.ratio_clip_min": "a bound of the ratio, 0.8 for 0.2",
    "per_device_train_batch_size": "tokens, not sequences",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "tokens, not sequences",
    "ppo_mini_batch_size": "a count, data.train_batch_size / ppo_mini_batch_size",
    "--global-batch-size": "a count of updates, so responses in a step / --global-batch-size",
    "generation_batch_size": "prompts, so generation_batch_size / num_generations",
    "num_train_epochs": "a count of rollout batches, epochs x prompts / rollout.prompts_per_step",
    "warmup_ratio": "a count, the ratio x the run's optimizer updates",
}


@pytest.mark.parametrize("theirs", UNITS)
def test_a_hint_says_the_unit_if_it_differs(theirs: str) -> None:
    hint = meant_by(theirs)
    assert hint is not None
    assert hint.advice == f"did you mean {hint.setting} ({UNITS[theirs]})?"


def test_a_name_means_the_same_inside_sections_of_the_policy_only() -> None:
    assert meant_by("actor_rollout_ref.rollout.n") == meant_by("--n-samples-per-prompt")
    assert meant_by("actor.lr") == meant_by("lr") == Hint("optimizer.lr")
    assert meant_by("policy.optimizer.clip_grad") == Hint("optimizer.clip_grad")
    assert meant_by("value.optimizer.clip_grad") is None
    assert meant_by("policy.optimizer.lr") is None


@pytest.mark.parametrize("section", ["critic", "teacher", "val_kwargs", "reward_model", "ref", "draft.optim", "x.y"])
def test_a_name_in_a_section_of_something_else_is_never_the_policys(section: str) -> None:
    for names in frameworks().values():
        for name, hint in names.items():
            if "*" in name:
                continue
            told = meant_setting((*section.split("."), *name.lstrip("-").replace("-", "_").split(".")))
            own = {"critic": r"critic\..*", "ref": r"loss\.reference_path", "teacher": r"teacher\.(path|top_k)"}.get(
                section, r"reward\.kind"
            )
            assert told is None or not told.setting or re.fullmatch(own, told.setting), (section, name, told, hint)
