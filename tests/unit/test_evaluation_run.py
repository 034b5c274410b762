"""`bapo eval` from end to end on the demo model, and how it handles bad responses and bad input."""

import asyncio
import itertools
import json
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

import bapo_megatron.evaluation.run as run_module
from bapo_megatron.assets import demo_model_path
from bapo_megatron.cli import main
from bapo_megatron.convert import convert
from bapo_megatron.engines.connected import ConnectedEngines, LoopThread
from bapo_megatron.errors import DataError, UserError
from bapo_megatron.evaluation.run import Asking, eval_config, evaluate
from bapo_megatron.prompts.chains import Chain
from bapo_megatron.resolved import resolve
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rollout.drivers import JudgeOnce, TextJudge
from bapo_megatron.types import Ended, NeedsEnvironment, Prompt, Sample, Segment
from tests.hang import HANG_S, PATIENT
from tests.unit.test_evaluate import Deadlines
from tests.unit.test_scheduler import ScriptedEngine

NUM_PROBLEMS, NUM_SAMPLES = 7, 4
SMALL = ["rollout.max_response_tokens=48", "data.max_prompt_tokens=16", "rollout.max_concurrent_requests=12"]


def write_chains(path: Path) -> list[Chain]:
    generator = random.Random(5)
    chains = [Chain.random(generator, 3, 4) for _ in range(NUM_PROBLEMS)]
    path.write_text("".join(json.dumps({"prompt": c.prompt, "answer": c.answer}) + "\n" for c in chains))
    return chains


def test_a_configuration_in_place_of_a_checkpoint_is_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(*arguments: str) -> str:
        assert main(["eval", *arguments]) == 2
        return re.sub(r"`.*? eval ", "`bapo eval ", capsys.readouterr().err)

    Path("mine.toml").write_text('[run]\nname = "x"\n[model]\npath = "demo"\n')
    what = "bapo: mine.toml is a configuration, and an evaluation needs weights: give them first, as in"
    assert told("mine.toml", "eval.top_k=3") == f"{what} `bapo eval demo mine.toml eval.top_k=3`\n"
    saved = Path("runs/x/checkpoints/step-000004")
    saved.mkdir(parents=True)
    (saved / "state.json").touch()
    (saved.parent / "latest").write_text(saved.name)
    assert told("mine.toml", "eval.top_k=3") == f"{what} `bapo eval runs/x eval.top_k=3`\n"
    Path("mine.toml").write_text("[run]\nnaem = 3\n")
    assert told("mine.toml") == f"{what} `bapo eval MODEL mine.toml`\n"
    assert "`bapo eval tool tool_demo`" in told("tool_demo")


def test_a_training_checkpoint_on_a_file_equals_brute_force(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    chains = write_chains(tmp_path / "chains.jsonl")
    run = tmp_path / "run"  # as a training run leaves it: its settings apply, its weights are converted
    (run / "checkpoints").mkdir(parents=True)
    convert(demo_model_path(), run / "checkpoints" / "step-000001", to="training")
    (run / "config.toml").write_text('[reward]\nkind = "chains"\n[data]\nmax_prompt_tokens = 16\n')
    out = tmp_path / "out"
    command = ["eval", str(run / "checkpoints" / "step-000001"), *SMALL, *PATIENT]
    command += ["--data", str(tmp_path / "chains.jsonl")]
    assert main([*command, "-n", str(NUM_SAMPLES), "--output", str(out)]) == 0

    result = json.loads((out / "result.json").read_text())
    responses = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    assert (result["judge"], result["weight_version"], result["data"]) == ("chains", 0, command[-1])
    assert not (out / "model").exists()
    verdicts: dict[int, list[bool]] = {i: [] for i in range(NUM_PROBLEMS)}
    votes: dict[int, list[str | None]] = {i: [] for i in range(NUM_PROBLEMS)}
    for response in responses:
        found = re.search(r"=(\d),$", response["response"])
        verdicts[response["index"]].append(found is not None and found[1] == chains[response["index"]].answer)
        votes[response["index"]].append(found[1] if found else None)
    assert {len(v) for v in verdicts.values()} == {NUM_SAMPLES}
    estimates = {name: e["value"] for name, e in result["estimates"].items()}
    assert 0 < estimates["avg@4"] < 1, "otherwise nothing is tested"
    assert estimates["avg@4"] == pytest.approx(statistics.fmean(statistics.fmean(v) for v in verdicts.values()))
    pairs = [any(pair) for v in verdicts.values() for pair in itertools.combinations(v, 2)]
    assert estimates["pass@2"] == pytest.approx(statistics.fmean(pairs))
    majority = []
    for i, cast in votes.items():
        valid = [x for x in cast if x is not None]
        best = {x for x in valid if valid.count(x) == max(map(valid.count, valid))}
        majority.append((chains[i].answer in best) / len(best) if best else 0.0)
    assert estimates["maj@4"] == pytest.approx(statistics.fmean(majority))
    assert estimates["response_tokens"] == pytest.approx(statistics.fmean(r["num_tokens"] for r in responses))
    told = capsys.readouterr()
    assert "avg@4" in told.out
    assert "7 problems with 4 responses each; --limit takes the first problems only" in told.err

    assert main([*command, "--output", str(out)]) == 2
    assert "is not empty: give another --output" in capsys.readouterr().err
    assert main([*command, "--output", str(out / "result.json" / "below")]) == 2
    assert "result.json/below: Not a directory; give another --output" in capsys.readouterr().err


class Texts:
    """A tokenizer whose tokens are whole responses."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def batch_decode(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [self.texts[i[0]] for i in ids]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""


@pytest.mark.parametrize(
    ("timeout_s", "answer", "rewards"),
    [
        (
            HANG_S,
            8,
            {
                "\\boxed{8}": 1.0,
                "": 0.0,
                "8 " * 1_000_000: 1.0,
                "\\boxed{\\frac{1}{": 0.0,
                "}}{{\\boxed{\\sqrt[3}{$$\\left(}}": 0.0,
                "\x00\ufffd\\boxed{8}": 1.0,
            },
        ),
        (2, "\\sqrt{8}", {"\\boxed{9^{9^{9^{9^9}}}}": 0.0}),
    ],
    ids=["answers", "tower-of-powers"],
)
def test_responses_that_are_no_answers_count_as_wrong_and_are_reported(
    tmp_path: Path, timeout_s: float, answer: int | str, rewards: dict[str, float]
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "3+5=", "answer": answer}))
    overrides = [f"reward.timeout_s={timeout_s}", "reward.concurrency=2"]
    config = eval_config(Path("demo"), [], overrides, path, len(rewards))
    with RewardScorer(config) as scorer:
        asking = Asking(resolve(config, demo_model_path()), scorer, None)
        asking.tokenizer = Texts(list(rewards))
        asking.driver = JudgeOnce(TextJudge(scorer, asking.tokenizer))
        (prompt,) = asking.prompts
        samples = [
            Sample.of(f"eval-0.{i}", prompt, (Segment.sampled(-1, 0, (i,), (-1.0,)),), NeedsEnvironment("stop"))
            for i in range(len(rewards))
        ]
        judged = asking.judged(asyncio.run(asking.driver.advance(samples)))
        (problem,) = asking.problems([prompt], judged)
    assert [response.reward for response in judged] == list(rewards.values())
    assert problem.num_passed == sum(rewards.values())
    has_no_verdict = [response.problem in ("timeout", "error") for response in problem.responses]
    assert has_no_verdict == [timeout_s == 2] * len(rewards)
    assert all(r.answer is None for r, text in zip(problem.responses, rewards, strict=True) if not text)


def test_judging_longer_than_engines_may_take_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closable(ScriptedEngine):
        async def close(self) -> None:
            pass

    engine = Closable()
    engine.version = -1  # the weights that it started with
    connected = ConnectedEngines([engine], HANG_S, LoopThread())  # type: ignore[list-item]
    deadlines = Deadlines(connected.loop, monkeypatch)

    class Unhurried:
        def verdicts(self, items: Sequence[tuple[Prompt, str]], in_thought: Sequence[bool] = ()) -> list[Verdict]:
            assert deadlines.now == []
            return [
                Verdict(Ended(reward=0.0, problem="timeout", message="no verdict in 1.6 s"), waited_s=1.6)
                for _ in items
            ]

    monkeypatch.setattr(run_module.ConnectedEngines, "connect", lambda *_: connected)
    write_chains(tmp_path / "chains.jsonl")
    settings = ["reward.kind=chains", "rollout.request_timeout_s=400", "rollout.max_retries=0", *SMALL]
    config = eval_config(Path("demo"), [], settings, tmp_path / "chains.jsonl", 2)
    asking = Asking(resolve(config, demo_model_path()), Unhurried(), 3)  # type: ignore[arg-type]
    problems = asking.ask(["http://scripted"], "a-key", tmp_path / "responses.jsonl", lambda _: None)
    assert deadlines.seen[0] == 800
    assert [p.count("timeout") for p in problems] == [2, 2, 2]
    assert len((tmp_path / "responses.jsonl").read_text().splitlines()) == 6


def test_a_reference_that_no_response_can_match_ends_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "3+5=", "answer": 8}\n{"prompt": "1+5=", "answer": "$$"}')
    command = [
        "eval",
        "demo",
        *SMALL,
        *PATIENT,
        "--data",
        str(path),
        "-n",
        "1",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "math-verify finds no number or expression in the answer '$$'" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("overrides", "rows", "error", "message"),
    [
        (["data.format=math"], ['{"prompt": "1+1=", "answer": 2}'], DataError, "field 'problem' or 'question'"),
        ([], ['{"prompt": "1+1="}'], DataError, "bad.jsonl:1: field 'answer' is missing"),
        ([], ['{"prompt": " ", "answer": 1}'], DataError, "the prompt is empty"),
        (["rollout.engine=attach"], [], UserError, "starts engines with the checkpoint's weights"),
    ],
)
def test_bad_input_is_one_error_before_any_engine_starts(
    tmp_path: Path, overrides: list[str], rows: list[str], error: type[Exception], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(rows))
    config = eval_config(Path("demo"), [], ["reward.kind=chains", *overrides], path, 2)
    with pytest.raises(error, match=message):
        evaluate(config, Path("demo"), tmp_path / "out")
    assert not (tmp_path / "out" / "logs").exists(), "so that the same --output can be given again"


def test_sglang_on_a_gpu_is_not_asked_for_float32(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run_module, "num_visible_gpus", lambda: 1)
    assert main(["eval", "demo", "--output", str(tmp_path / "eval"), "rollout.engine=sglang"]) == 2
    error = capsys.readouterr().err
    assert "has no kernels for float32" in error
    assert 'set model.dtype="bfloat16"' in error
    assert not (tmp_path / "eval").exists()


def test_a_checkpoint_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["eval", str(tmp_path / "nothing"), "--output", str(tmp_path / "out")]) == 2
    assert "there is nothing at" in capsys.readouterr().err
