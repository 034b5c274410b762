"""The page of all settings, and the names of other frameworks for them."""

import re

from write_coming_from_page import PAGE as COMING_FROM
from write_coming_from_page import filled_page

from bapo_megatron.config.coming_from import meant_by, their_settings
from bapo_megatron.config.page import settings_page
from bapo_megatron.config.paths import schema


def test_the_page_has_every_setting() -> None:
    page = settings_page()
    shown = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    sections = set(re.findall(r"^##+ \[+([\w.]+)\]", page, re.MULTILINE))
    assert {path[0] for path in schema() if len(path) > 1} <= sections
    assert {path[1] for path in schema() if len(path) > 1} <= shown


def test_every_setting_says_what_it_is() -> None:
    bare = [line for line in settings_page().splitlines() if line.startswith("| `") and "|  |" in line]
    assert [line.split("`")[1] for line in bare] == []


def test_the_tables_of_other_frameworks_are_current() -> None:
    text = COMING_FROM.read_text(encoding="utf-8")
    assert text == filled_page(text), "run: python scripts/write_coming_from_page.py"


def test_names_of_other_frameworks_mean_settings() -> None:
    settings = {name.split("=")[0] for name in their_settings().values()}
    assert settings <= {".".join(path) for path in schema()}
    assert meant_by("actor_rollout_ref.rollout.n") == meant_by("--n-samples-per-prompt") == "rollout.samples_per_prompt"
    assert meant_by("actor.lr") == meant_by("lr") == "optimizer.lr"
    assert meant_by("--use-rollout-routing-replay") == "model.replay_routes"
    assert meant_by("actor.lr", whole=True) is None
