"""The model that ships with the package, the script that makes it, and what model.path means."""

import importlib.util
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pupils import CHAIN_RESPONSE_TOKENS, CalculatorPupil, ChainPupil, GuessingPupil
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_start import build_tokenizer, mean_reward, sample_responses

from bapo_megatron.assets import demo_model_path, resolve_model_path, shipped_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError
from bapo_megatron.prompts.chains import ChainSource, apply_operator
from bapo_megatron.prompts.hidden_numbers import hidden_numbers
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.sums import sums
from bapo_megatron.rewards.answers import judge_chain

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("make_demo_model")


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


class TestShippedModel:
    def test_is_an_ordinary_small_checkpoint(self):
        weights = demo_model_path() / "model.safetensors"
        assert weights.stat().st_size < 5e6
        model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype="auto")
        assert 0.9e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
        assert model.dtype == torch.float32
        assert all(torch.isfinite(p).all() for p in model.parameters())

    def test_shapes_split_over_two_tensor_and_four_pipeline_ranks(self):
        config = AutoModelForCausalLM.from_pretrained(demo_model_path()).config
        for size in (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size):
            assert size % 2 == 0
        assert config.vocab_size % 4 == 0
        assert config.num_hidden_layers % 4 == 0
        assert config.architectures == ["Qwen3ForCausalLM"]

    def test_tokenizer_has_one_token_a_character_for_the_whole_vocabulary(self, tokenizer):
        model_config = AutoModelForCausalLM.from_pretrained(demo_model_path()).config
        assert len(tokenizer) == model_config.vocab_size == len(tokenizer.get_vocab())
        assert tokenizer.eos_token_id == model_config.eos_token_id
        text = "3+5*2=3+5=1,1*2=2,"
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
        assert tokenizer.unk_token_id not in tokenizer.encode(
            "".join(ChainSource(100, 0, {})[i].text for i in range(100))
        )

    def test_pass_rate_leaves_room_to_learn(self, tokenizer):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(demo_model_path())
        source = ChainSource(512, 1, {})
        questions = [source[i] for i in range(len(source))]
        rate = mean_reward(model, tokenizer, questions, judge_chain, CHAIN_RESPONSE_TOKENS)
        assert 0.2 < rate < 0.4  # measured 0.30; standard error 0.02

    def test_fails_by_what_it_believes_more_than_by_chance(self, tokenizer):
        """Wrong facts carry most probability but leave some for the right result, as reinforcement needs."""
        model = AutoModelForCausalLM.from_pretrained(demo_model_path()).eval()
        probs: dict[str, list[float]] = {"believed": [], "right": []}
        for (operator, left, right), believed in ChainPupil(0).beliefs.wrong.items():
            text = f"{left}{operator}{right}+1={left}{operator}{right}="
            with torch.no_grad():
                logits = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
            p = logits.softmax(-1)
            probs["believed"].append(p[tokenizer.convert_tokens_to_ids(str(believed))].item())
            right_result = str(apply_operator(operator, left, right))
            probs["right"].append(p[tokenizer.convert_tokens_to_ids(right_result)].item())
        mean = {key: sum(values) / len(values) for key, values in probs.items()}
        assert 0.5 < mean["believed"] < 0.9
        assert 0.08 < mean["right"] < 0.35


class TestStudyModels:
    def test_chains(self):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(shipped_model_path("study"))
        assert 1.2e5 < sum(p.numel() for p in model.parameters()) < 1.3e5
        source = ChainSource(512, 1, {})
        questions = [source[i] for i in range(len(source))]
        tokenizer = AutoTokenizer.from_pretrained(shipped_model_path("study"))
        rate = mean_reward(model, tokenizer, questions, judge_chain, CHAIN_RESPONSE_TOKENS)
        assert 0.24 < rate < 0.43  # measured 0.34; standard error 0.02

    def test_chains_for_a_mixture_of_experts(self):
        """Every expert takes part, so that both ranks of the demo have work."""
        torch.manual_seed(1)
        folder = shipped_model_path("moe")
        assert (folder / "model.safetensors").stat().st_size < 1.8e6
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert 4.1e5 < sum(p.numel() for p in model.parameters()) < 4.3e5
        source = ChainSource(512, 1, {})
        questions = [source[i] for i in range(len(source))]
        rate = mean_reward(model, tokenizer, questions, judge_chain, CHAIN_RESPONSE_TOKENS)
        assert 0.22 < rate < 0.42  # measured 0.33; standard error 0.02
        pupil = ChainPupil(1)
        text = "".join("".join(pupil.demonstrate()) for _ in range(20))
        ids = torch.tensor([tokenizer.encode(text)[:512]])
        routers = model(ids, output_router_logits=True).router_logits
        assert len(routers) == 2
        for logits in routers:
            assert len(logits.topk(2).indices.unique()) == 8

    def test_chains_for_linear_attention(self):
        torch.manual_seed(1)
        folder = shipped_model_path("hybrid")
        assert (folder / "model.safetensors").stat().st_size < 8e5
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
        source = ChainSource(512, 1, {})
        questions = [source[i] for i in range(len(source))]
        rate = mean_reward(model, tokenizer, questions, judge_chain, CHAIN_RESPONSE_TOKENS)
        assert 0.22 < rate < 0.42  # measured 0.33; standard error 0.02

    @pytest.mark.gym
    def test_three_domains(self):
        torch.manual_seed(1)
        folder = shipped_model_path("study-domains")
        assert (folder / "model.safetensors").stat().st_size < 1.2e6
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        for source, judge, max_tokens in load_script("make_domains_model").domains(1):
            questions = [source[i] for i in range(64)]
            reward = mean_reward(model, tokenizer, questions, judge, max_tokens)
            assert 0.12 < reward < 0.55, source.name  # measured on 256: 0.30, 0.36, 0.28


class TestToolModel:
    def test_the_shipped_tokenizer_is_the_scripts_and_has_all_words(self):
        made = json.loads(build_tokenizer(load_script("make_tool_model").VOCABULARY).backend_tokenizer.to_str())
        shipped = json.loads((shipped_model_path("tool") / "tokenizer.json").read_text())
        del made["padding"], shipped["padding"]
        assert made == shipped
        tokenizer = AutoTokenizer.from_pretrained(shipped_model_path("tool"))
        pupils = CalculatorPupil(1), GuessingPupil(1)
        texts = ["".join(pupil.demonstrate()) for pupil in pupils for _ in range(200)]
        assert all(len(tokenizer.encode(text)) == len(text) for text in texts)
        assert tokenizer.unk_token_id not in tokenizer.encode("".join(texts) + "!")

    def test_responses_and_answers_take_turns(self):
        pupil = CalculatorPupil(0)
        shown = [pupil.demonstrate() for _ in range(2000)]
        asks = [texts for texts in shown if len(texts) > 2]
        assert 0.17 < len(asks) / len(shown) < 0.23
        for prompt, *others in asks:
            calls, answers, result = others[:-1:2], others[1::2], others[-1]
            assert prompt.endswith("=")
            assert result.isdigit()
            for call, answer in zip(calls, answers, strict=True):
                left, operator, right = re.fullmatch(r"(\d+)([*+])(\d+)\?", call).groups()
                assert answer == f"{int(left) * int(right) if operator == '*' else int(left) + int(right)};"

    def test_guesses_follow_the_answers_more_often_than_chance(self):
        pupil, num_heeded, num_guesses = GuessingPupil(0), 0, 0
        for _ in range(2000):
            prompt, *others = pupil.demonstrate()
            assert prompt == "7:"
            guesses, answers = [int(text.removesuffix("?")) for text in others[::2]], others[1::2]
            assert len(answers) == len(guesses) - 1 <= 2
            for i in range(1, len(guesses)):
                heard = zip(guesses[:i], answers[:i], strict=True)
                num_heeded += all(
                    guesses[i] < guess if answer == "<" else guesses[i] > guess for guess, answer in heard
                )
                num_guesses += 1
        assert 0.64 < num_heeded / num_guesses < 0.72  # measured 0.68; 0.54 if chance decided

    def test_the_model_guesses_numbers(self):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(shipped_model_path("tool"))
        tokenizer = AutoTokenizer.from_pretrained(shipped_model_path("tool"))
        rows = list(hidden_numbers(210))
        assert {row["answer"] for row in rows} == set("0123456")
        texts = sample_responses(model, tokenizer, [row["prompt"] for row in rows], 2)
        guesses = Counter(text for text in texts if re.fullmatch(r"[0-6]\?", text))
        assert guesses.total() > 0.95 * len(texts)
        assert len(guesses) == 7, "every number"

    def test_the_model_asks_sometimes(self, tmp_path):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(shipped_model_path("tool"))
        assert 1.2e5 < sum(p.numel() for p in model.parameters()) < 1.3e5
        tokenizer = AutoTokenizer.from_pretrained(shipped_model_path("tool"))
        texts = sample_responses(model, tokenizer, [row["prompt"] for row in sums(512, 1)], 8)
        assert 0.12 < sum("?" in text for text in texts) / len(texts) < 0.28


class TestScript:
    def test_the_shipped_tokenizer_is_the_scripts(self, script):
        made = json.loads(build_tokenizer(script.VOCABULARY).backend_tokenizer.to_str())
        shipped = json.loads((demo_model_path() / "tokenizer.json").read_text())
        del made["padding"], shipped["padding"]  # left over from the last call before saving
        assert made == shipped

    def test_demonstrations_fit_and_have_a_long_tail(self):
        pupil = ChainPupil(0)
        lengths = [len(pupil.demonstrate()[1]) + 1 for _ in range(2000)]  # plus the end token
        assert max(lengths) <= CHAIN_RESPONSE_TOKENS
        assert min(lengths) < 16
        assert 0.05 < sum(length > 40 for length in lengths) / len(lengths) < 0.4

    @pytest.mark.parametrize("model", ["demo", "moe", "hybrid"])
    def test_same_seed_same_weights(self, script, tmp_path, monkeypatch, model):
        folders = [tmp_path / name for name in ("a", "b", "c")]
        for folder, seed in zip(folders, (3, 3, 4), strict=True):
            command = ["make_demo_model.py", "--model", model, "--output", folder, "--seed", seed]
            command += ["--num-updates", 2, "--batch-size", 8]
            monkeypatch.setattr("sys.argv", [str(word) for word in command])
            monkeypatch.setattr(script, "mean_reward", lambda *args: 0.0)
            script.main()
        a, b, c = (load_file(folder / "model.safetensors") for folder in folders)
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert not all(torch.equal(a[name], c[name]) for name in a)
        resolve_model_path(str(folders[0]))
        AutoTokenizer.from_pretrained(folders[0])


class TestResolveModelPath:
    def test_demo(self):
        assert resolve_model_path("demo") == demo_model_path()

    def test_folder(self, tmp_path):
        for name in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json"):
            (tmp_path / name).touch()
        assert resolve_model_path(str(tmp_path)) == tmp_path

    def test_a_mistyped_name_of_a_shipped_model_is_answered_with_the_name(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError, match=r"there is no folder .*/demmo; did you mean demo\?$"):
            resolve_model_path("demmo")
        (tmp_path / "demmo").mkdir()
        with pytest.raises(CheckpointError, match=r"demmo has no config\.json; give a local folder"):
            resolve_model_path("demmo")

    def test_missing_smollm2_tells_how_to_make_it(self, tmp_path):
        path = str(tmp_path / "models" / "SmolLM2-135M-Instruct")
        with pytest.raises(
            CheckpointError, match=r"there is no folder .*; make it with `python scripts/prepare_smollm2"
        ):
            resolve_model_path(path)

    @pytest.mark.parametrize(
        ("present", "message"),
        [
            ([], "has no config.json"),
            (["config.json", "pytorch_model.bin"], r"has no \*.safetensors"),
            (["config.json", "model.safetensors"], "has no tokenizer"),
        ],
    )
    def test_incomplete_folder(self, tmp_path, present, message):
        for name in present:
            (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=message):
            resolve_model_path(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "is_partial"),
    [*((f"{name}demo", True) for name in ("", "tool_", "guess_", "moe_", "hybrid_")), ("smollm2_135m", False)],
)
def test_shipped_configs_are_valid(name, is_partial):
    config = Config.model_validate(tomllib.loads((REPOSITORY / "configs" / f"{name}.toml").read_text()))
    rollout = config.rollout
    assert ((rollout.groups_in_flight or 0) > rollout.prompts_per_step) == is_partial
    assert ((rollout.tokens_per_round or rollout.max_response_tokens) < rollout.max_response_tokens) == is_partial
    assert config.loss.name == "bapo"


def test_example_prompts_can_be_read():
    source = JsonlSource(str(REPOSITORY / "configs" / "math_example.jsonl"))
    assert len(source) >= 4
