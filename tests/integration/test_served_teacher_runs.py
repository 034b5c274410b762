"""A teacher on servers next to the same model in the learner; runs that are killed while it scores, and without it."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from bapo_megatron.assets import demo_model_path, shipped_model_path
from bapo_megatron.buffer.packing import sequences_of
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.whole_batch import policy_passes, scorers_of, with_scores
from bapo_megatron.resolved import resolve
from bapo_megatron.rollout.group_files import group_from_json
from bapo_megatron.rollout.teacher import Teacher, TeacherServers
from bapo_megatron.runtime.files import read_jsonl
from bapo_megatron.tokens import TEACHER_LOGPROBS, TEACHER_STREAMS, TEACHER_VERSIONS
from bapo_megatron.types import Batch, Ended, Prompt, Sample, Sampled, Segment
from tests.distributed import HANG_S, run_distributed
from tests.integration.gates import Gates
from tests.integration.killable import Attempt, Engine, checkpoint_of, metrics_of, small_run, surviving
from tests.integration.learner_reference import load_float64, random_batch
from tests.integration.test_small_batches import dealt
from tests.rollout_servers import KEY, LAUNCHERS, MAX_CONTEXT, VOCAB_SIZE, EventLoop, tiny_model

COEF = 0.7
LENGTHS = (9, 40, 23, 5, 17, 31, 12)
TOLERANCE = 1e-5  # nats


def batch_of() -> Batch:
    batch = random_batch(seq_lens=LENGTHS)
    generator = torch.Generator().manual_seed(5)
    ids_T = torch.randint(2, VOCAB_SIZE, (sum(LENGTHS),), generator=generator)
    return Batch(**{name: getattr(batch, name) for name in batch.__slots__} | {"token_ids_T": ids_T})


def samples_of(batch: Batch) -> Iterator[Sample]:
    """Yield a sample of each sequence: its given tokens, and then its sampled ones."""
    lengths = batch.seq_lens_S.tolist()
    values = (batch.token_ids_T, batch.sampled_T, batch.behaviour_logprobs_T)
    for i, (ids, sampled, mu) in enumerate(zip(*(v.split(lengths) for v in values), strict=True)):
        prompt = Prompt(i, tuple(ids[~sampled].tolist()), "", "", "test")
        segment = Segment.sampled(0, 0, ids[sampled].tolist(), mu[sampled].clamp(max=0).tolist())
        yield Sample.of(f"{i}.0", prompt, [segment], Ended("stop", 1.0))


def served_rows(urls: Sequence[str], key_file: Path, batch: Batch) -> torch.Tensor:
    """Return what the servers say of the sampled tokens, in their order."""
    config = Config.model_validate({"teacher": {"urls": urls, "api_key": str(key_file)}}).teacher
    servers, loop = TeacherServers(config, VOCAB_SIZE, HANG_S), EventLoop()
    teacher = Teacher(servers.score, HANG_S)
    try:
        rows = [loop.run(teacher.rows(sample))[TEACHER_LOGPROBS] for sample in samples_of(batch)]
    finally:
        loop.run(servers.close())
        loop.stop()
    return torch.cat([torch.tensor(of_sample) for of_sample in rows])


def check_advantages(rank: int, world_size: int, root: Path, layout: dict[str, Any]) -> None:
    """Compare a served teacher's scores with the same model's in the learner, and its advantages with the formula."""
    whole, served_R = batch_of(), torch.load(root / "served.pt", weights_only=True)
    is_known = torch.arange(len(served_R)) % 3 > 0  # the other tokens lack rows
    found: dict[str, Batch] = {}
    for name, teacher in {"held": {"path": str(root / "b")}, "served": {"urls": ["http://x:1"]}}.items():
        config = Config.model_validate(
            {
                "parallel": {"timeout_s": HANG_S, **layout},
                "teacher": {"coef": COEF, **teacher},
                "loss": {"name": "grpo"},
                "train": {"max_tokens_per_microbatch": 60},
            }
        )
        learner = MegatronLearner(resolve(config, root / "a"))
        scorers = scorers_of(config, learner, learner.reference, learner.teachers)
        batch = whole
        if name == "served":
            rows_T = TEACHER_LOGPROBS.new_tensor(whole.sampled_T.numel())
            rows_T[whole.sampled_T] = torch.where(is_known, served_R, TEACHER_LOGPROBS.filler)
            batch = whole.having(TEACHER_LOGPROBS, rows_T)
        needed = sequences_of(policy_passes(config, 0, learner, scorers), batch, learner.layout.data_size)
        found[name] = with_scores(dealt(batch, needed, learner.layout.data_rank), scorers, learner, config)
        parallel_state.destroy_model_parallel()
    held, served = found["held"], found["served"]
    is_known_T = torch.zeros_like(whole.sampled_T).masked_scatter(whole.sampled_T, is_known)
    for one in (held, served):
        assert one.extra[TEACHER_LOGPROBS].shape == one.behaviour_logprobs_T.shape
    here_T = served.here(is_known_T)
    wanted_T = torch.zeros(whole.sampled_T.numel()).masked_scatter(whole.sampled_T, served_R)
    held_T = held.extra[TEACHER_LOGPROBS][held.here(whole.sampled_T)]
    of_server_T = held.here(wanted_T)[held.here(whole.sampled_T)]
    torch.testing.assert_close(held_T, of_server_T, atol=TOLERANCE, rtol=0)
    gap_T = torch.where(is_known_T, COEF * (wanted_T.double() - whole.behaviour_logprobs_T.double()), 0.0)
    expected_T = served.here(whole.advantages_T.double() + gap_T).float()
    torch.testing.assert_close(served.advantages_T, expected_T, atol=1e-6, rtol=0)
    assert here_T.any()
    trained = gap_T[whole.mask_T & is_known_T]
    assert served.metrics["teacher/kl"] == pytest.approx(-float(trained.mean()) / COEF, abs=1e-6)
    assert served.metrics["teacher/advantage_std"] == pytest.approx(float(trained.std(correction=0)), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_a_server_scores_as_the_learner_does(kind: str, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        tiny_model(tmp_path / name, seed, MAX_CONTEXT[kind])
        (tmp_path / name / "tokenizer.json").write_text("{}")  # a teacher is a complete model folder
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "servers").mkdir()
    with LAUNCHERS[kind](tmp_path / "b", tmp_path / "servers") as urls:
        torch.save(served_rows(urls, tmp_path / "key", batch_of()), tmp_path / "served.pt")
    run_distributed(check_advantages, 1, tmp_path, {})
    if kind == "embedded":
        for layout in ({"data": 2}, {"context": 2}, {"pipeline": 2, "last_stage_layers": 1}):
            run_distributed(check_advantages, 2, tmp_path, layout)


# runs


ALONE = ("advantage.kind=teacher", "reward.kind=none", "loss.name=grpo", "parallel.tensor=1", "train.num_steps=3")
HINT = "{answer},{prompt}"
TURNS = (
    *(setting for setting in ALONE if "reward.kind" not in setting),
    "environment.kind=tests.unit.step_functions:talk",
    'environment.stop_tokens=["0","1","2","3"]',
)


def hang_in_scoring(flag: Path, number: int) -> None:
    """Let a rank wait forever with its score of this number; the flag says that it has come to that."""
    from bapo_megatron.engines.http import HttpEngine

    score, asked = HttpEngine.score, iter(range(number))

    async def counted(self: HttpEngine, *arguments: Any) -> Any:
        import asyncio

        if next(asked, None) is None:
            flag.touch()
            await asyncio.sleep(1e9)
        return await score(self, *arguments)

    HttpEngine.score = counted  # type: ignore[method-assign]


@contextlib.contextmanager
def engines(folder: Path, kind: str) -> Iterator[tuple[Engine, Engine | None, tuple[str, ...]]]:
    """Yield the policy's engine, the teacher's if there is one, and the settings."""
    with contextlib.ExitStack() as stack:
        engine = Engine(folder / "engine")
        stack.callback(engine.kill)
        if kind in ("hint", "hint in turns"):
            yield engine, None, (*(ALONE if kind == "hint" else TURNS), f"teacher.hint={HINT}")
            return
        teacher = Engine(folder / "teacher", "--model-path", str(shipped_model_path("study")))
        stack.callback(teacher.kill)
        yield engine, teacher, (*ALONE, f'teacher.urls=["{teacher.url}"]')


VERSIONS = {"urls": {-1}, "hint": {0, 2, 4}, "hint in turns": {0, 2}}  # short turns end a step earlier


@pytest.mark.slow
@pytest.mark.parametrize("kind", VERSIONS)
def test_a_run_that_was_killed_while_its_teacher_scores_is_repeated_bit_for_bit(kind: str, tmp_path: Path) -> None:
    with engines(tmp_path, kind) as (engine, _, settings):
        with Attempt(small_run(tmp_path, "alone", *settings), engine) as attempt:
            attempt.finish()
        alone, killed = attempt.run_dir, small_run(tmp_path, "killed", *settings)
        for number in (7, 26):  # in the first step, and after a checkpoint
            flag = tmp_path / f"flag-{number}"
            with Attempt(killed, engine, prepare=partial(hang_in_scoring, flag, number)) as attempt:
                assert attempt.kill_when(flag.exists)
        with Attempt(killed, engine) as attempt:
            attempt.finish()
    assert metrics_of(attempt.run_dir) == metrics_of(alone)
    for step in (1, 2, 3):
        assert checkpoint_of(attempt.run_dir, step) == checkpoint_of(alone, step), f"step {step}"
    rows = read_jsonl(alone / "metrics.jsonl")
    assert all(row["teacher/kl"] != 0 and row["rollout/num_unannotated"] == 0 for row in rows)
    groups = [group for entry in surviving(alone, "step").values() for group in entry["groups"]]
    samples = [s for g in groups for s in group_from_json(g, TEACHER_STREAMS).samples]
    scored = [segment for sample in samples for _, segment in sample.sampled_segments]
    assert all(bool((segment.rows[TEACHER_LOGPROBS] <= 0).all()) for segment in scored)
    versions = {int(version) for segment in scored for version in segment.rows[TEACHER_VERSIONS]}
    assert versions == VERSIONS[kind], "the policy's at the end of each sample"
    if kind != "urls":
        check_hinted(samples, are_several=kind == "hint in turns")


def check_hinted(samples: Sequence[Sample], *, are_several: bool) -> None:
    """Compare the scores by the first weights with transformers', after the hinted prompts."""
    model = load_float64(demo_model_path())
    tokenizer, num_turns = load_tokenizer(demo_model_path()), []
    for sample in samples:
        (trajectory,) = sample.trajectories
        hinted = tokenizer.encode(HINT.format(answer=sample.prompt.answer, prompt=sample.prompt.text))
        later = trajectory.token_ids[trajectory.segments[0].num_tokens :].tolist()
        sampled = [segment.origin for segment in trajectory.segments[1:] for _ in range(segment.num_tokens)]
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*hinted, *later]])).logits[0, len(hinted) - 1 : -1]
        wanted_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(later)[:, None])[:, 0]
        wanted_R = wanted_T[[isinstance(origin, Sampled) for origin in sampled]]
        rows = [segment.rows for _, segment in trajectory.sampled_segments]
        found_R, versions_R = (torch.cat([torch.tensor(row[stream]) for row in rows]) for stream in TEACHER_STREAMS)
        if not versions_R.any():
            torch.testing.assert_close(found_R.double(), wanted_R, atol=TOLERANCE, rtol=0)
            num_turns.append(len(trajectory.turns))
    assert len(num_turns) > 10
    assert (max(num_turns) > 1) == are_several


@pytest.mark.slow
def test_a_run_goes_on_without_its_teacher(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates", 2)
    with (
        engines(tmp_path, "urls") as (engine, teacher, settings),
        Attempt(small_run(tmp_path, "left", *settings), engine, gates) as attempt,
    ):
        assert teacher is not None
        gates.wait(2, lambda: not attempt.has_ended(), attempt.complaints)
        teacher.kill()
        gates.open(2)
        attempt.finish()
    rows = read_jsonl(attempt.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["rollout/num_unannotated"] == 0
    assert rows[-1]["rollout/num_unannotated"] > 0
