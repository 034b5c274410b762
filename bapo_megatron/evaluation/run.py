"""Evaluating a checkpoint: sample and judge all problems with training's Evaluator and drivers, and save the results.

checkpoint -> Hugging Face folder -> engines -> Evaluator, driver (rollout/) -> result.json
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.assets import SHIPPED_MODELS
from bapo_megatron.config.load import load_config, shipped_configs
from bapo_megatron.config.schema import Config
from bapo_megatron.convert import hf_folder, is_hf
from bapo_megatron.engines.connected import ConnectedEngines
from bapo_megatron.engines.key import new_key
from bapo_megatron.engines.start import running_engines
from bapo_megatron.errors import ConfigError, UserError, plural
from bapo_megatron.evaluation.results import Answered, Evaluation, Problem, by_question, compared
from bapo_megatron.hf.tokenizer import end_token_ids, load_tokenizer
from bapo_megatron.preflight.check import num_visible_gpus
from bapo_megatron.preflight.checks.model import check_server_dtype
from bapo_megatron.prompts.stop_tokens import stop_token_ids
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.rewards.answers import final_answer, has_answers
from bapo_megatron.rewards.scorer import RewardScorer
from bapo_megatron.rewards.verdicts import JudgeSpec
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from bapo_megatron.rollout.agents import AgentPrograms
from bapo_megatron.rollout.drivers import Driver, JudgeOnce, TextJudge, begins_in_thought, texts
from bapo_megatron.rollout.evaluate import Evaluator
from bapo_megatron.rollout.manager import EVAL_SEED
from bapo_megatron.rollout.turn_tokens import TurnTokens, environment_of, turn_driver
from bapo_megatron.runs.resuming import num_steps_saved
from bapo_megatron.runtime import program, stamp
from bapo_megatron.runtime.files import JsonlWriter, explaining_os_errors, write_atomically
from bapo_megatron.types import Ended, Given, Prompt, Sample

_FRESH = -1  # weight version of engines that never received weights


def eval_config(checkpoint: Path, files: Sequence[str], overrides: Sequence[str], data: Path | None, n: int) -> Config:
    """Load the settings of an evaluation: first the checkpoint's run, if any, then `files`, then `overrides`.

    Args:
        data: the file of problems; None means the problems of [data].
        n: responses per problem.

    Raises:
        ConfigError: see `load_config`.
        UserError: the checkpoint is a configuration.
    """
    _refuse_configuration(checkpoint, files, overrides)
    run_config = config_of(checkpoint)
    derived = [f"model.path={json.dumps(str(checkpoint))}", f"eval.samples_per_prompt={n}"]
    if data is not None:
        derived += ['data.source="jsonl"', f"data.path={json.dumps(str(data))}", "data.sources=[]"]
    return load_config([*([run_config] if run_config else []), *files], [*derived, *overrides])


def _refuse_configuration(checkpoint: Path, files: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse a configuration in place of a checkpoint, with the command for the newest weights that it stands for."""
    name = str(checkpoint)
    is_file = checkpoint.suffix == ".toml" and checkpoint.is_file()
    if not is_file and (checkpoint.exists() or name in SHIPPED_MODELS or name not in shipped_configs()):
        return
    weights, others = "MODEL", (name, *files)
    with contextlib.suppress(ConfigError):  # a mistake in it is told once there is a model
        config = load_config(others, overrides)
        run = Path(config.run.dir) / config.run.name
        weights, others = (config.model.path, others) if num_steps_saved(run) is None else (str(run), (*files,))
    command = shlex.join([*program(), "eval", weights, *others, *overrides])
    raise UserError(f"{name} is a configuration, and an evaluation needs weights: give them first, as in `{command}`")


def note_of_training(config: Config, data: Path | None) -> str | None:
    """Return a note for an evaluation on the training prompts, or None for one on others.

    Args:
        data: the file of problems given by the user, if any.
    """
    if data is not None or not config.data.has_rows:
        return None
    return f"these are the prompts of training, {config.data.origin}; for others, give --data FILE"


def new_folder() -> Path:
    """Return the folder of an evaluation for which the user names none."""
    return Path("evals") / stamp()


def evaluate(
    config: Config, checkpoint: Path, output: Path, *, limit: int | None = None, tell: Callable[[str], None] = print
) -> Evaluation:
    """Sample and judge; write result.json, responses.jsonl and the engines' logs to `output`.

    Args:
        checkpoint: Hugging Face folder, run, training checkpoint, or "demo", the shipped model.
        limit: number of problems; None means all of a file, or `eval.num_prompts` of a procedural source.
        tell: receives each progress line.

    Raises:
        UserError: checkpoint, problems, judge, environment or engines do not fit together, or `output` is not empty or
            cannot be written.
    """
    run = resolve(config)
    if not run.placement.num_servers:
        raise UserError(
            f'rollout.engine="{config.rollout.engine}": an evaluation starts engines with the checkpoint\'s weights; '
            'set rollout.engine to one that is started, such as "embedded" or "sglang"'
        )
    if problem := next(check_server_dtype(config), None) if num_visible_gpus() else None:
        raise UserError(problem.message)
    if not config.reward.is_given:
        raise UserError('reward.kind="none" gives no reward to measure; name a judge, such as reward.kind=math')
    if config.data.sources:
        raise UserError("data.sources mix the prompts of training: name the file of problems with --data")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not empty: give another --output, or remove it")
    seed = config.run.seed
    if not config.data.has_rows:  # not the training problems, as in a run's own evaluation
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed + EVAL_SEED})})
    with explaining_os_errors(output, "give another --output"):
        output.mkdir(parents=True, exist_ok=True)
    with (
        hf_folder(checkpoint, output / "model", run.own) as (model_path, version),
        contextlib.ExitStack() as stack,
    ):
        scorer = stack.enter_context(RewardScorer(config)) if config.has_judge else None
        has_turns = config.environment.is_used
        environment = stack.enter_context(contextlib.closing(environment_of(config))) if has_turns else None
        run = resolve(config, model_path)
        asked = Asking(run, scorer, limit, environment)
        (output / "logs").mkdir()
        key, here = new_key(), run.placement.without_trainer().on()
        with running_engines(run, output / "logs", here, key) as urls:
            problems = asked.ask(urls, key, output / "responses.jsonl", tell)
    r = config.rollout
    facts = {
        "checkpoint": str(checkpoint),
        "weight_version": version,
        "data": config.data.origin,
        "format": config.data.format,
        "judge": asked.kind,
        "engine": r.engine,
        "samples_per_problem": config.eval.samples_per_prompt,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "top_k": config.eval.top_k,
        "max_response_tokens": r.max_response_tokens,
        "seed": seed,
        "num_skipped_prompts": asked.num_skipped,
    }
    evaluation = Evaluation(facts, problems, has_answers(asked.kind), seed)
    write_atomically(output / "result.json", json.dumps(evaluation.to_json(), indent=1) + "\n")
    return evaluation


def compare(before: Path, after: Path) -> str:
    """Return the comparison of two evaluations' folders (see `compared`). Raises UserError if one is none."""
    values = []
    for folder in (before, after):
        file = folder / "result.json"
        try:
            values.append(json.loads(file.read_text(encoding="utf-8")))
            by_question(values[-1])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            why = f"{folder} is not the folder of an evaluation: {file}: {reason}"
            raise UserError(f"{why}; give folders that `bapo eval` has written, such as evals/after") from error
    return compared(*values)


class Asking:
    """Problems, and their judge or environment, checked before any engine starts."""

    def __init__(
        self,
        run: Resolved,
        scorer: RewardScorer | None,
        limit: int | None,
        environment: EnvironmentProcesses | AgentPrograms | None = None,
    ) -> None:
        self._run, config = run, run.config
        self.kind = JudgeSpec.of(config).kind if config.has_judge else config.environment.kind
        self.tokenizer = load_tokenizer(run.folder, run.own)
        end_ids = end_token_ids(run.folder, self.tokenizer, run.own)
        self._stop_ids = stop_token_ids(config, self.tokenizer, end_ids)
        self.driver: Driver
        if environment is not None:
            tokens = TurnTokens.of(config, self.tokenizer, run.shape.vocab_size)
            self.driver = turn_driver(config, environment, tokens, config.rollout.max_response_tokens, scorer)
        else:
            assert scorer is not None
            self.driver = JudgeOnce(TextJudge(scorer, self.tokenizer))
        stream = PromptStream(config, self.tokenizer)
        self.prompts = stream.in_order(limit or (None if config.data.has_rows else config.eval.num_prompts))
        self.num_skipped = stream.num_skipped
        self.extent = (
            f"{plural(len(self.prompts), 'problem')} with {plural(config.eval.samples_per_prompt, 'response')} each"
            f"{'' if limit else '; --limit takes the first problems only'}"
        )

    def ask(self, urls: Sequence[str], key: str, responses: Path, tell: Callable[[str], None]) -> tuple[Problem, ...]:
        """Ask as many problems at a time as the engines sample concurrently; write each response once judged.

        Raises:
            EngineError: no engine is left, or the deadline for the responses to some problems passed.
            UserError: the judge rejects the data.
        """
        config = self._run.config
        num_at_once = max(1, config.rollout.max_concurrent_requests * len(urls) // config.eval.samples_per_prompt)
        one_set = config.unnamed_eval_set
        problems: list[Problem] = []
        writer = JsonlWriter(responses)
        tell(self.extent)
        engines = ConnectedEngines.connect(config.rollout, self._run.engine, urls, self._run.shape.vocab_size, key)
        with contextlib.closing(writer), contextlib.closing(engines):
            for start in range(0, len(self.prompts), num_at_once):
                prompts = self.prompts[start : start + num_at_once]
                drivers = {one_set.name: self.driver}
                evaluator = Evaluator(config, engines.pool, [(one_set, prompts)], self._stop_ids, drivers)
                engines.loop.run(evaluator.sample(_FRESH), evaluator.deadline_s, evaluator.what, evaluator.progress)
                (samples,) = engines.loop.submit(evaluator.judged()).result().values()
                judged = self.judged(samples)
                for response in judged:
                    writer.write(response.record())
                problems += self.problems(prompts, judged)
                passed = sum(p.num_passed for p in problems)
                num = sum(len(p.responses) for p in problems)
                tell(
                    f"{len(problems)} of {plural(len(self.prompts), 'problem')}, "
                    f"{passed} of {plural(num, 'response')} pass"
                )
        return tuple(problems)

    def judged(self, samples: Sequence[Sample]) -> list[Judged]:
        """Return the ended samples as responses."""
        ends = [s.need for s in samples if isinstance(s.need, Ended)]
        turns = [self._turns(s) if self._run.config.environment.is_used else [] for s in samples]
        words = texts(self.tokenizer, samples)
        turns_of = [s.trajectories[-1].turns for s in samples]
        ids = [found[-1].tolist() if found else [] for found in turns_of]
        last = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        inside = [begins_in_thought(s.trajectories[-1], decode) for s in samples]
        return [Judged(*found) for found in zip(samples, words, last, inside, ends, turns, strict=True)]

    def _turns(self, sample: Sample) -> list[dict[str, str]]:
        """Return who wrote what after the prompt, special tokens included."""
        turns: list[tuple[str, list[int]]] = []
        for segment in sample.trajectories[-1].segments[1:]:
            by = segment.origin.by if isinstance(segment.origin, Given) else "policy"
            if not turns or turns[-1][0] != by:
                turns.append((by, []))
            turns[-1][1].extend(segment.token_ids.tolist())
        return [{"by": by, "text": self.tokenizer.decode(ids, skip_special_tokens=False)} for by, ids in turns]

    def problems(self, prompts: Sequence[Prompt], judged: Sequence[Judged]) -> Iterator[Problem]:
        """Yield the problem of each prompt, with its responses."""
        by_prompt: dict[int, list[Answered]] = {prompt.prompt_id: [] for prompt in prompts}
        for response in judged:
            by_prompt[response.sample.prompt.prompt_id].append(response.answered(self.kind))
        for prompt in prompts:
            yield Problem(prompt.prompt_id, prompt.text, prompt.answer, tuple(by_prompt[prompt.prompt_id]))


@dataclass(frozen=True, slots=True)
class Judged:
    """One response: its text and how it ended."""

    sample: Sample
    text: str  # the policy's words
    last: str  # the words of its last turn
    in_thought: bool  # whether they begin in a thought that the chat template has opened
    end: Ended
    turns: list[dict[str, str]]  # with an environment: {"by": "policy" or "environment", "text": ...}

    @property
    def reward(self) -> float:
        """The reward; 0 if the environment failed, which counts as wrong here."""
        return self.sample.reward or 0.0

    def answered(self, kind: str) -> Answered:
        s = self.sample
        answer = final_answer(kind, s.prompt.answer, self.last, self.in_thought) if has_answers(kind) else None
        is_cut = s.finish_reason == "length"
        return Answered(self.reward, answer, s.num_sampled_tokens, is_cut, self.end.problem, self.end.parts)

    def record(self) -> dict[str, Any]:
        """Return its line of responses.jsonl as a JSON value."""
        return {
            "index": self.sample.prompt.prompt_id,
            "sample_id": self.sample.sample_id,
            "response": self.text,
            **({"turns": self.turns} if self.turns else {}),
            "reward": self.sample.reward,
            "parts": dict(self.end.parts),
            "verifier_problem": self.end.problem,
            "verifier_message": self.end.message,
            "num_tokens": self.sample.num_sampled_tokens,
            "finish_reason": self.sample.finish_reason,
        }


def config_of(checkpoint: Path) -> Path | None:
    """Find the config.toml of the run behind a training checkpoint: runs/x, checkpoints/step-N or its learner/."""
    if is_hf(checkpoint):
        return None
    folder = checkpoint.absolute()
    candidates = (place / "config.toml" for place in (folder, *folder.parents[:3]))
    return next((path for path in candidates if path.is_file()), None)
