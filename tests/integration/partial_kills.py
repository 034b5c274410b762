"""Runs that are killed while responses are partial, at moments drawn from committed seeds.

    python -m tests.integration.partial_kills turns|routes|hybrid FOLDER [--first 0] [--count 10]

Each case is one run of the tool demo, killed at a gate (gates.py) and resumed. It must equal, bit for bit, the run that
was left alone. One line in FOLDER/cases.jsonl says what was compared.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.rollout.book import groups_of
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl
from bapo_megatron.types import NeedsTokens, Sample, Trajectory
from tests.integration.gates import Gates
from tests.integration.killable import SMALL, Attempt, Engine
from tests.integration.test_kill_resume import assert_same
from tests.integration.test_routes_run import REPLAY, save_small_mixture

NUM_STEPS = 3
TALK = (
    "environment.kind=tests.unit.step_functions:talk",
    'environment.stop_tokens=["0","1","2","3"]',
    "advantage.kind=grpo_turns",
    "advantage.gamma=0.9",
    "rollout.tokens_per_round=1",
    "rollout.groups_in_flight=9",
)
"""Three short turns with rewards in each sample, and one token a round, so that a step leaves samples anywhere."""


def save_small_hybrid(folder: Path, like: Path) -> None:
    """Save a random hybrid with another model's vocabulary."""
    from tests.hybrid_model import save_hybrid  # ranks, which import this module, save a second each without it

    save_hybrid(folder, 0, 128, vocab_size=load_hf_config(like)["vocab_size"])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(like / file, folder)


@dataclass(frozen=True)
class Kind:
    """The runs of a campaign: their settings, and the gates in front of which they are killed.

    Runs with a model of their own are killed behind their first checkpoint, which holds partial responses.
    """

    settings: tuple[str, ...]
    moments: dict[str, tuple[int, int]]  # the first and the last gate that may be drawn
    save_model: Callable[[Path, Path], None] | None = None  # into a folder, like another; None means the demo's
    streams: frozenset[str] = frozenset()  # what responses keep for each token


KINDS = {
    "turns": Kind(TALK, {"sample": (3, 10), "answer": (50, 150)}),
    "routes": Kind(
        (*TALK, "rollout.groups_in_flight=6", *REPLAY),
        {"sample": (20, 36), "answer": (109, 196), "update": (3, 6), "save": (35, 102), "push": (221, 438)},
        save_small_mixture,
        frozenset({"routes"}),
    ),
    "hybrid": Kind(
        (*TALK, "rollout.groups_in_flight=6", "parallel.tensor=2", "optimizer.lr=0.01", "train.entropy_coef=0.5"),
        {"sample": (22, 43), "answer": (112, 221), "update": (3, 6), "save": (35, 102), "push": (123, 242)},
        save_small_hybrid,
    ),
}


@dataclass(frozen=True)
class Case:
    """The moment at which a run is killed."""

    seed: int
    place: str  # the gate in front of which the run waits
    with_engine: bool  # the engine dies too; otherwise the resumed run meets what it holds

    @classmethod
    def draw(cls, seed: int, moments: dict[str, tuple[int, int]]) -> "Case":
        rng = random.Random(seed)
        sort = [*moments][seed % len(moments)]
        return cls(seed, f"{sort}-{rng.randint(*moments[sort])}", rng.random() < 0.5)


class Campaign:
    """A run that is left alone, and others of its kind that are killed."""

    def __init__(self, folder: Path, name: str) -> None:
        """Finish the run that is left alone."""
        self.folder, self.kind, self.model = folder, KINDS[name], shipped_model_path("tool")
        if self.kind.save_model:
            self.kind.save_model(folder / "model", self.model)
            self.model = folder / "model"
        engine = new_engine(folder / "engine", self.model)
        self.reference = finished(self.run("alone"), engine)
        engine.kill()

    def run(self, name: str) -> Config:
        return tool_run(self.folder, name, f"model.path={self.model}", *self.kind.settings)

    def kept(self, run: Path, step: int) -> list[Sample]:
        """Return the samples in a checkpoint."""
        streams = ModelFacts.of(self.model).returned_streams(self.kind.streams)
        state = CheckpointStore.load(run / "checkpoints" / f"step-{step:06d}", {})["rollout"]
        return [s for groups in groups_of(state, streams) for g in groups for s in g.samples]

    def fight(self, seed: int) -> dict[str, Any]:
        """Kill a run, resume it and compare it; return its line of the table."""
        case, name = Case.draw(seed, self.kind.moments), f"case-{seed}"
        config, gates = self.run(name), Gates(self.folder / f"gates-{name}", case.place)
        counts = self.folder / f"{name}.counts"
        engine = new_engine(self.folder / f"engine-{name}", self.model)
        try:
            with Attempt(config, engine, gates, partial(_keep_counts, counts)) as attempt:
                assert attempt.kill_at_gate(case.place), f"the run ended before {case.place}"
                num_done = attempt.num_done()
            if case.with_engine:
                engine.kill()
                engine = new_engine(self.folder / f"engine-{name}", self.model)
            run = finished(config, engine)
        finally:
            engine.kill()
        assert len(list((run / "logs").glob("attempt-*"))) == 2
        killed = read_jsonl(counts)[-1]
        assert killed["within_turns"], "otherwise no sample was in the middle of a later turn"
        resumed = within_turns(self.kept(run, num_done) if num_done else [])
        if self.kind.save_model:
            assert resumed["within_turns"], "otherwise no partial response was resumed"
        if "routes" in self.kind.streams:
            assert all(found["routes"] == found["tokens"] for found in (killed, resumed)), "tokens without routes"
        assert_same(run, self.reference, NUM_STEPS)
        samples = [s for step in range(1, NUM_STEPS + 1) for s in self.kept(run, step)]
        return asdict(case) | {
            "steps_before": num_done,
            "killed": killed,
            "resumed": resumed,
            "given_tokens_in_checkpoints": sum(s.num_given_tokens for s in samples),
            "equal": True,
        }


def new_engine(folder: Path, model: Path) -> Engine:
    return Engine(folder, "--model-path", str(model), "--max-context", "128")


def tool_run(folder: Path, name: str, *settings: str) -> Config:
    own = (f"run.dir={folder}", f"run.name={name}", f"train.num_steps={NUM_STEPS}")
    return load_config(["tool_demo"], [*own, *SMALL, *settings])


def finished(config: Config, engine: Engine) -> Path:
    with Attempt(config, engine) as attempt:
        attempt.finish()
        return attempt.run_dir


def within_turns(samples: Iterable[Sample]) -> dict[str, int]:
    """Count samples that have a part of a later turn, behind what their environment said.

    Also count their tokens without the first, whose row belongs to no token, and the rows of routes for these.
    """
    found = [
        s.turn
        for s in samples
        if isinstance(s.need, NeedsTokens) and s.num_given_tokens > 0 and s.turn.num_turn_tokens > 0
    ]
    num_tokens = sum(turn.num_tokens - 1 for turn in found)
    return {"within_turns": len(found), "tokens": num_tokens, "routes": sum(map(_num_routes, found))}


def _num_routes(turn: Trajectory) -> int:
    rows = [(stream, rows) for segment in turn.segments for stream, rows in segment.rows.items()]
    return sum(int((values != stream.missing).all((1, 2)).sum()) for stream, values in rows)


def _keep_counts(path: Path) -> None:
    """Write, at each round and behind each batch, how many samples are in the middle of a later turn."""
    from bapo_megatron.rollout.manager import RolloutManager
    from bapo_megatron.rollout.scheduler import Scheduler

    writer, run_round, next_batch = JsonlWriter(path), Scheduler._run_round, RolloutManager.next_batch

    def write(scheduler: Scheduler, step: int) -> None:
        growing = scheduler.book.growing()
        writer.write({"step": step, "growing": len(growing)} | within_turns(growing))

    async def written_round(self: Scheduler, step: int) -> bool:
        write(self, step)
        return await run_round(self, step)

    def written_batch(self: RolloutManager, step: int, version: int) -> Any:
        batch = next_batch(self, step, version)
        write(self.scheduler, step)
        return batch

    Scheduler._run_round, RolloutManager.next_batch = written_round, written_batch  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.integration.partial_kills")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=10, help="number of seeds")
    options = parser.parse_args()
    campaign = Campaign(options.folder.absolute(), options.kind)
    table, num_failed = JsonlWriter(campaign.folder / "cases.jsonl"), 0
    for seed in range(options.first, options.first + options.count):
        try:
            row = campaign.fight(seed)
        except AssertionError as error:
            num_failed += 1
            row = asdict(Case.draw(seed, campaign.kind.moments)) | {"error": str(error)[-4000:] or repr(error)}
        table.write(row)
        print(json.dumps(row), flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
