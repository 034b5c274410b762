"""Which tokens end a turn: what a model's files, its chat template and settings say together."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from bapo_megatron import cli
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.engines.embedded.text import TextModel
from bapo_megatron.errors import CheckpointError, UserError
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.hf.tokenizer import end_token_ids
from bapo_megatron.prompts.stop_tokens import stop_token_ids
from tests.unit.test_embedded_engine import stop
from tests.unit.test_turn_tokens import byte_level

VOCAB = load_hf_config(demo_model_path())["vocab_size"]
ABSENT = object()


def a_folder(folder: Path, config: Any, generation: Any) -> Path:
    """Write what config.json and generation_config.json say of eos_token_id."""
    folder.mkdir(exist_ok=True)
    values = json.loads((demo_model_path() / "config.json").read_text())
    for name, given, table in (("config.json", config, values), ("generation_config.json", generation, {})):
        table.pop("eos_token_id", None)
        table |= {} if given is ABSENT else {"eos_token_id": given}
        (folder / name).write_text(json.dumps(table))
    return folder


def as_set(value: Any) -> set[int]:
    return set(value) if isinstance(value, list) else set() if value is None or value is ABSENT else {value}


def test_all_files_are_read_however_they_say_it(tmp_path: Path) -> None:
    rng = random.Random("end tokens")

    def said() -> Any:
        kinds = (ABSENT, None, [], rng.randrange(VOCAB), rng.sample(range(VOCAB), rng.randint(1, 4)))
        return rng.choice(kinds)

    for _ in range(300):
        config, generation, own = said(), said(), rng.choice([None, rng.randrange(VOCAB)])
        folder = a_folder(tmp_path, config, generation)
        if rng.random() < 0.2:
            generation = ABSENT
            (folder / "generation_config.json").unlink()
        named = as_set(config) | as_set(generation)
        found = end_token_ids(folder, SimpleNamespace(eos_token_id=own))
        assert len(found) == len(set(found))
        assert set(found) == named | as_set(own)
        assert own is None or found[0] == own
        assert set(end_token_ids(folder)) == named


@pytest.mark.parametrize("value", [VOCAB, -1, True, "1", 1.0, [1, VOCAB], [[1]], {"a": 1}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_is_no_token_of_the_model_is_refused_with_its_file(tmp_path: Path, file: str, value: Any) -> None:
    folder = a_folder(tmp_path, *((value, 1) if file == "config.json" else (1, value)))
    with pytest.raises(CheckpointError, match=rf"{file}: .*eos_token_id ?= ?{re.escape(json.dumps(value)[:4])}"):
        end_token_ids(folder)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = a_folder(tmp_path, 1, 1) / "generation_config.json"
    for text in ("{", "[1]"):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            end_token_ids(tmp_path)


def stops(*end_ids: int, ignored: tuple[str, ...] = (), template: str | None = None, **data: Any) -> tuple[int, ...]:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    config = Config.model_validate({"data": data, "rollout": {"ignore_stop_tokens": ignored}})
    return stop_token_ids(config, tokenizer, end_ids)


def test_a_setting_leaves_an_end_out() -> None:
    eos, end = byte_level().convert_tokens_to_ids(["<eos>", "<|im_end|>"])
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert stops(eos, eos, 3) == (eos, 3)
    assert stops(eos, template=template) == (eos,)
    assert stops(eos, template=template, chat_template=True) == (eos, end)
    assert stops(eos, template=template, chat_template=True, ignored=("<eos>",)) == (end,)
    assert stops(eos, template=template, chat_template=True, ignored=("<|im_end|>",)) == (eos,)
    assert stops(template=template, chat_template=True) == (end,)
    for ignored, reason in (
        (("<pad>",), "ignore_stop_tokens: '<pad>' ends no turn; these do: '<eos>'"),
        (("12",), "ignore_stop_tokens: '12' is 2 tokens of"),
        (("<eos>",), "no token ends a response.*leave less in rollout.ignore_stop_tokens"),
    ):
        with pytest.raises(UserError, match=reason):
            stops(eos, ignored=ignored)
    with pytest.raises(UserError, match=r"no token ends a response.*model's generation_config\.json"):
        stops()


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """Return the demo's model without an end token."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in demo_model_path().iterdir():
        values = json.loads(file.read_text()) if file.suffix == ".json" else None
        if values is None or file.name == "tokenizer.json":
            (folder / file.name).symlink_to(file)
            continue
        (folder / file.name).write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("eos_token")}))
    return folder


def test_check_and_eval_refuse_a_model_without_an_end(endless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "demo", f"model.path={json.dumps(str(endless))}"]) == 2
    assert "no token ends a response" in capsys.readouterr().err
    assert cli.main(["eval", str(endless), "--output", str(endless / "eval"), "data.source=chains"]) == 2
    assert "no token ends a response" in capsys.readouterr().err
    (endless / "generation_config.json").write_text('{"eos_token_id": 99999}')
    assert cli.main(["check", "demo", f"model.path={json.dumps(str(endless))}"]) == 2
    assert "generation_config.json: eos_token_id = 99999 must be the number of a token" in capsys.readouterr().err
    (endless / "generation_config.json").write_text('{"eos_token_id": [1]}')
    assert cli.main(["check", "demo", f"model.path={json.dumps(str(endless))}"]) == 0


def test_a_served_model_ends_its_turns_as_in_training(endless: Path) -> None:
    eos, pad = AutoTokenizer.from_pretrained(demo_model_path()).convert_tokens_to_ids(["<eos>", "<pad>"])
    (endless / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 5]}))
    (endless / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<pad>{% endfor %}")

    def ends(**rollout: Any) -> tuple[set[int], set[int]]:
        config = Config.model_validate({"rollout": rollout})
        model = TextModel.load(
            endless, name="m", max_context=64, max_running=1, dtype=torch.float32, num_threads=1, config=config
        )
        stop(model.engine)
        return set(model.engine._end_ids), set(model.chat_stop_ids)

    assert ends() == ({eos, 5}, {eos, 5, pad})
    assert ends(ignore_stop_tokens=["<eos>"]) == ({5}, {5, pad})
    assert ends(ignore_stop_tokens=["<pad>"]) == ({eos, 5}, {eos, 5})
