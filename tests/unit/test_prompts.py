"""Prompt sources and the stream over them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, DataError
from bapo_megatron.prompts.chains import Chain, ChainSource
from bapo_megatron.prompts.jsonl import JsonlSource
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource
from bapo_megatron.prompts.stream import PromptStream


@pytest.fixture(scope="module")
def shared_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture
def tokenizer(shared_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    shared_tokenizer.chat_template = None
    return shared_tokenizer


def make_config(seed: int = 0, **data: Any) -> Config:
    return Config.model_validate({"run": {"seed": seed}, "data": data})


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*lines: Any) -> str:
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return str(file)

    return write


class TestChains:
    def test_worked_example(self):
        chain = Chain(terms=(3, 5, 2), operators="+*")
        assert chain.prompt == "3+5*2="
        assert chain.answer == "2"  # (3 + 5) mod 7 = 1, 1 * 2 = 2: no operator precedence

    @settings(deadline=None)  # other processes may hold the cores
    @given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 4))
    def test_answer_is_the_chain_folded_from_the_left(self, seed, min_terms, more):
        chain = Chain.random(random.Random(seed), min_terms, min_terms + more)
        assert min_terms <= len(chain.terms) <= min_terms + more
        nested = str(chain.terms[0])
        for operator, term in zip(chain.operators, chain.terms[1:], strict=True):
            nested = f"({nested}{operator}{term})"
        assert chain.answer == str(eval(nested) % 7)

    def test_items_depend_on_seed_and_index_only(self):
        source, again = ChainSource(100, 3, {}), ChainSource(100, 3, {})
        backwards = [again[i] for i in reversed(range(100))]
        assert [source[i] for i in range(100)] == backwards[::-1]
        other = ChainSource(100, 4, {})
        assert [source[i].text for i in range(100)] != [other[i].text for i in range(100)]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"min_term": 3}, "min_term: Extra inputs"),
            ({"min_terms": 5, "max_terms": 4}, r"max_terms \(4\) is smaller than min_terms \(5\)"),
            ({"min_terms": 1}, "min_terms: .*greater than or equal to 2"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(DataError, match=message):
            ChainSource(10, 0, options)


class TestJsonl:
    def test_reads_prompts_in_file_order(self, jsonl):
        path = jsonl({"prompt": "a", "answer": "1"}, "", {"prompt": "b\u2028c", "answer": [2], "more": True})
        source = JsonlSource(path)
        assert [(q.text, q.answer) for q in (source[0], source[1])] == [("a", "1"), ("b\u2028c", [2])]
        assert source[1].where == f"{path}:3"

    def test_line_separators_inside_strings_do_not_split(self, tmp_path):
        file = tmp_path / "p.jsonl"
        file.write_bytes('\ufeff{"prompt": "a\u2028b", "answer": 1}\r\n'.encode())
        assert JsonlSource(str(file))[0].text == "a\u2028b"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"prompt": "a"', r"prompts.jsonl:2: not JSON: .*column"),
            ('["a", "b"]', r"prompts.jsonl:2: expected an object .* got a list"),
            ('{"prompt": "a"}', r"prompts.jsonl:2: field 'answer' is missing \(fields: 'prompt'\)"),
            ('{"question": "a", "answer": 1}', r"field 'prompt' is missing \(fields: 'answer', 'question'\)"),
            (
                '{"prompt": 3, "answer": 1}',
                r"prompts.jsonl:2: field 'prompt' must be a string or a list of messages, got a number",
            ),
            ('{"prompt": "a", "answer": null}', r"prompts.jsonl:2: field 'answer' must not be null"),
            ("[" * 100_000, r"prompts.jsonl:2: "),
            ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", r"prompts.jsonl:2: not JSON that Python reads: .*digits"),
            (
                r'{"prompt": "ab\ud83d", "answer": 1}',
                r"2: field 'prompt' is not valid Unicode: '\\ud83d' at character 2",
            ),
            (
                r'{"prompt": "a", "answer": "\ud800"}',
                r"jsonl:2: field 'answer' is not valid Unicode: '\\ud800'",
            ),
            (r'{"prompt": "a", "answer": {"\ud800": 1}}', r"prompts.jsonl:2: field 'answer' is not valid Unicode"),
            ('{"prompt": "a", "answer": NaN}', r"prompts.jsonl:2: field 'answer' holds NaN or a number beyond"),
            ('{"prompt": "a", "answer": [-Infinity]}', r"prompts.jsonl:2: field 'answer' holds NaN or a number beyond"),
            ('{"prompt": "a", "answer": 1e400}', r"prompts.jsonl:2: field 'answer' holds NaN or a number beyond"),
            ('{"prompt": "a", "answer": ' + "[" * 101 + "]" * 101 + "}", r"prompts.jsonl:2: field 'answer' is nested"),
        ],
    )
    def test_malformed_line_names_file_and_line(self, jsonl, line, message):
        with pytest.raises(DataError, match=message):
            JsonlSource(jsonl({"prompt": "a", "answer": "1"}, line))

    def test_missing_empty_and_undecodable_files(self, tmp_path, jsonl):
        with pytest.raises(DataError, match=r"needs data\.path"):
            JsonlSource(None)
        with pytest.raises(DataError, match=r"there is no file .*nowhere.jsonl"):
            JsonlSource(str(tmp_path / "nowhere.jsonl"))
        with pytest.raises(DataError, match="the file has no prompts"):
            JsonlSource(jsonl("", "  "))
        with pytest.raises(DataError, match="cannot read"):
            JsonlSource(str(tmp_path))
        (tmp_path / "latin1.jsonl").write_bytes(b'{"prompt": "\xe9"}')
        with pytest.raises(DataError, match=r"not UTF-8 \(byte 12\)"):
            JsonlSource(str(tmp_path / "latin1.jsonl"))


@pytest.mark.gym
class TestReasoningGym:
    OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # noqa: RUF012

    def test_questions_are_reproducible_and_json(self):
        source, again = (ReasoningGymSource("basic_arithmetic", 50, 1, self.OPTIONS) for _ in range(2))
        assert len(source) == 50
        assert [source[i] for i in range(50)] == [again[i] for i in reversed(range(50))][::-1]
        assert json.loads(json.dumps(source[7].answer)) == source[7].answer
        assert source[7].where == "reasoning_gym basic_arithmetic item 7"

    def test_bad_settings(self):
        with pytest.raises(DataError, match=r"'basic_arithmetics' is not one of .*did you mean basic_arithmetic"):
            ReasoningGymSource("basic_arithmetics", 10, 0, {})
        with pytest.raises(DataError, match=r"basic_arithmetic: .*'digits'"):
            ReasoningGymSource("basic_arithmetic", 10, 0, {"digits": 2})
        with pytest.raises(DataError, match="max_terms must be >= min_terms"):
            ReasoningGymSource("basic_arithmetic", 10, 0, {"min_terms": 3, "max_terms": 2})


class TestStream:
    def test_each_epoch_visits_every_prompt_once_in_a_new_order(self, tokenizer):
        stream = PromptStream(make_config(size=20), tokenizer)
        prompts = [stream.next() for _ in range(60)]
        assert [p.prompt_id for p in prompts] == list(range(60))
        epochs = [[p.text for p in prompts[i : i + 20]] for i in (0, 20, 40)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
        assert epochs[0] != epochs[1] != epochs[2]

    def test_tokens_spell_the_prompt(self, tokenizer):
        prompt = PromptStream(make_config(size=5), tokenizer).next()
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert len(prompt.token_ids) == len(prompt.text)

    def test_seed_decides(self, tokenizer):
        def texts(seed: int) -> list[str]:
            stream = PromptStream(make_config(seed, size=50), tokenizer)
            return [stream.next().text for _ in range(50)]

        assert texts(0) == texts(0) != texts(1)

    @pytest.mark.parametrize("num_read", [0, 1, 7, 9, 10, 25])
    def test_resume_goes_on_with_the_very_next_prompt(self, tokenizer, jsonl, num_read):
        lines = [{"prompt": "" if i == 4 else str(i), "answer": i} for i in range(10)]
        config = make_config(source="jsonl", path=jsonl(*lines), on_bad_prompt="skip")
        whole, half = PromptStream(config, tokenizer), PromptStream(config, tokenizer)
        for _ in range(num_read):
            assert whole.next() == half.next()
        resumed = PromptStream(config, tokenizer)
        resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
        assert [resumed.next() for _ in range(15)] == [whole.next() for _ in range(15)]
        assert resumed.state_dict() == whole.state_dict()

    def test_resume_refuses_another_source(self, tokenizer):
        state = PromptStream(make_config(size=10), tokenizer).state_dict()
        with pytest.raises(CheckpointError, match="size = 10, but this run has 11"):
            PromptStream(make_config(size=11), tokenizer).load_state_dict(state)
        with pytest.raises(CheckpointError, match="seed = 0, but this run has 5"):
            PromptStream(make_config(5, size=10), tokenizer).load_state_dict(state)

    def test_bad_prompt_is_an_error_that_names_it(self, tokenizer, jsonl):
        path = jsonl({"prompt": " \n", "answer": 1})
        with pytest.raises(DataError, match=r"prompts.jsonl:1: the prompt is empty; .*on_bad_prompt = \"skip\""):
            PromptStream(make_config(source="jsonl", path=path), tokenizer).next()
        path = jsonl({"prompt": "1" * 9, "answer": 1})
        stream = PromptStream(make_config(source="jsonl", path=path, max_prompt_tokens=8), tokenizer)
        with pytest.raises(DataError, match=r"prompts.jsonl:1: the prompt has 9 tokens, .*max_prompt_tokens = 8"):
            stream.next()

    def test_all_prompts_of_a_file_are_checked_before_a_run(self, tokenizer, jsonl):
        lines = [{"prompt": "1" * (9 if i in (33, 150) else 1), "answer": 1} for i in range(200)]
        path = jsonl(*lines)
        config = make_config(source="jsonl", path=path, max_prompt_tokens=8)
        with pytest.raises(DataError, match=r"prompts.jsonl:34: the prompt has 9 tokens.*\(2 of 200 prompts are"):
            PromptStream(config, tokenizer).check()
        config = make_config(source="jsonl", path=path, max_prompt_tokens=8, on_bad_prompt="skip")
        stream = PromptStream(config, tokenizer)
        stream.check()
        assert stream.skipped_too_long == 0
        PromptStream(make_config(source="jsonl", path=path), tokenizer).check()
        none_fits = make_config(source="jsonl", path=jsonl(*lines[33:34] * 3), max_prompt_tokens=8)
        with pytest.raises(DataError, match=r"3 of 3 .*; correct them or data.max_prompt_tokens: all would be left"):
            PromptStream(none_fits, tokenizer).check()  # skipping them would not help
        empty = make_config(source="jsonl", path=jsonl(*[{"prompt": " ", "answer": 1}] * 3))
        with pytest.raises(DataError, match=r"3 of 3 .*; correct them: all would be left"):
            PromptStream(empty, tokenizer).check()
        with pytest.raises(DataError, match=r"chains item .* the prompt has"):
            PromptStream(make_config(size=10**6, max_prompt_tokens=5), tokenizer).check()

    def test_bad_prompts_are_skipped_and_counted_if_asked(self, tokenizer, jsonl):
        path = jsonl(*({"prompt": text, "answer": 1} for text in ("1", "", "2" * 8, "3" * 9)))
        config = make_config(source="jsonl", path=path, max_prompt_tokens=8, on_bad_prompt="skip")
        stream = PromptStream(config, tokenizer)
        assert {stream.next().text for _ in range(4)} == {"1", "2" * 8}
        stream = PromptStream(config, tokenizer)
        prompts = [stream.next() for _ in range(20)]
        assert [p.prompt_id for p in prompts] == list(range(20))
        assert stream.skipped_empty in (9, 10)
        assert stream.skipped_too_long in (9, 10)

    def test_no_usable_prompt_ends_instead_of_searching_forever(self, tokenizer, jsonl):
        path = jsonl({"prompt": "", "answer": 1}, {"prompt": "1" * 9, "answer": 1})
        config = make_config(source="jsonl", path=path, max_prompt_tokens=8, on_bad_prompt="skip")
        with pytest.raises(DataError, match="none of its 2 prompts can be used"):
            PromptStream(config, tokenizer).next()

    def test_a_lone_usable_prompt_is_found_in_every_epoch(self, tokenizer, jsonl):
        path = jsonl(*({"prompt": "1" if i == 3 else "", "answer": 1} for i in range(8)))
        stream = PromptStream(make_config(source="jsonl", path=path, on_bad_prompt="skip"), tokenizer)
        assert [stream.next().text for _ in range(50)] == ["1"] * 50

    def test_chat_template(self, tokenizer, jsonl):
        path = jsonl({"prompt": "1+2", "answer": "3"})
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }},{% endfor %}{% if add_generation_prompt %}={% endif %}"
        )
        stream = PromptStream(make_config(source="jsonl", path=path, chat_template=True), tokenizer)
        assert tokenizer.decode(stream.next().token_ids) == "1+2,="
        config = make_config(source="jsonl", path=path, chat_template=True, system_prompt="6")
        prompt = PromptStream(config, tokenizer).next()
        assert tokenizer.decode(prompt.token_ids) == "6,1+2,="
        assert prompt.text == "1+2"

    def test_chat_template_settings_that_cannot_work(self, tokenizer):
        with pytest.raises(DataError, match="tokenizer has no chat template"):
            PromptStream(make_config(chat_template=True), tokenizer)
        with pytest.raises(DataError, match=r"set data\.chat_template = true"):
            PromptStream(make_config(system_prompt="Be brief."), tokenizer)
        tokenizer.chat_template = "{{ messages[0].content }}{% if tools %}{% endif %}{{ level }}"
        PromptStream(make_config(chat_template=True, template_options={"level": 1}), tokenizer)
        for name in ("levels", "messages", "tools", "tokenize"):
            with pytest.raises(DataError, match=f"chat template has no option '{name}'"):
                PromptStream(make_config(chat_template=True, template_options={name: 1}), tokenizer)
