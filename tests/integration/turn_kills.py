"""Runs with an environment that are killed in the middle of turns, at moments drawn from committed seeds.

    python -m tests.integration.turn_kills FOLDER [--first 0] [--count 10]

Each case is one run of the tool demo, killed before one of its requests for tokens or questions to its environment, and
resumed. It must equal, bit for bit, the run that was left alone. One line in FOLDER/cases.jsonl says what was compared.
"""

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.rollout.book import groups_of
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl
from bapo_megatron.types import NeedsTokens, Sample
from tests.integration.gates import Gates
from tests.integration.killable import SMALL, Attempt, Engine
from tests.integration.test_kill_resume import assert_same

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
MOMENTS = {"sample": (3, 10), "answer": (50, 150)}  # the first and the last gate that may be drawn


@dataclass(frozen=True)
class Case:
    """The moment at which a run is killed."""

    seed: int
    place: str  # the gate in front of which the run waits
    with_engine: bool  # the engine dies too; otherwise the resumed run meets what it holds

    @classmethod
    def draw(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        kind = [*MOMENTS][seed % len(MOMENTS)]
        return cls(seed, f"{kind}-{rng.randint(*MOMENTS[kind])}", rng.random() < 0.5)


def new_engine(folder: Path) -> Engine:
    """Start an engine with the tool demo's model."""
    return Engine(folder, "--model-path", str(shipped_model_path("tool")), "--max-context", "128")


def tool_run(folder: Path, name: str, *settings: str) -> Config:
    own = (f"run.dir={folder}", f"run.name={name}", f"train.num_steps={NUM_STEPS}")
    return load_config(["tool_demo"], [*own, *SMALL, *settings])


def finished(config: Config, engine: Engine) -> Path:
    with Attempt(config, engine) as attempt:
        attempt.finish()
        return attempt.run_dir


def kept_in(run: Path, step: int) -> list[Sample]:
    """Return the samples in a checkpoint."""
    state = CheckpointStore.load(run / "checkpoints" / f"step-{step:06d}", {})["rollout"]
    return [s for groups in groups_of(state, ()) for g in groups for s in g.samples]


def is_within_turn(sample: Sample) -> bool:
    """Whether the sample has a part of a later turn, behind what its environment said."""
    return isinstance(sample.need, NeedsTokens) and sample.num_given_tokens > 0 and sample.turn.num_turn_tokens > 0


def fight(folder: Path, case: Case, reference: Path) -> dict[str, Any]:
    """Kill a run, resume it and compare it; return its line of the table."""
    name = f"case-{case.seed}"
    config, gates = tool_run(folder, name, *TALK), Gates(folder / f"gates-{name}", case.place)
    rounds = folder / f"{name}.rounds"
    engine = new_engine(folder / f"engine-{name}")
    try:
        with Attempt(config, engine, gates, partial(_keep_rounds, rounds)) as attempt:
            assert attempt.kill_at_gate(case.place), f"the run ended before {case.place}"
            num_done = attempt.num_done()
        within = read_jsonl(rounds)[-1]["within_turns"]
        assert within, "otherwise no sample was in the middle of a later turn"
        if case.with_engine:
            engine.kill()
            engine = new_engine(folder / f"engine-{name}")
        run = finished(config, engine)
    finally:
        engine.kill()
    assert len(list((run / "logs").glob("attempt-*"))) == 2
    assert_same(run, reference, NUM_STEPS)
    in_checkpoint = sum(map(is_within_turn, kept_in(run, num_done))) if num_done else 0
    samples = [s for step in range(1, NUM_STEPS + 1) for s in kept_in(run, step)]
    return asdict(case) | {
        "steps_before": num_done,
        "within_turns": within,
        "within_turns_in_checkpoint": in_checkpoint,
        "given_tokens_in_checkpoints": sum(s.num_given_tokens for s in samples),
        "equal": True,
    }


def _keep_rounds(path: Path) -> None:
    """Write at each round how many samples are in the middle of a later turn."""
    from bapo_megatron.rollout.scheduler import Scheduler

    writer, run_round = JsonlWriter(path), Scheduler._run_round

    async def kept(self: Scheduler, step: int) -> bool:
        growing = self.book.growing()
        writer.write({"step": step, "growing": len(growing), "within_turns": sum(map(is_within_turn, growing))})
        return await run_round(self, step)

    Scheduler._run_round = kept  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.integration.turn_kills")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=10, help="number of seeds")
    options = parser.parse_args()
    folder = options.folder.absolute()
    engine = new_engine(folder / "engine")
    reference = finished(tool_run(folder, "alone", *TALK), engine)
    engine.kill()
    table, num_failed = JsonlWriter(folder / "cases.jsonl"), 0
    for case in map(Case.draw, range(options.first, options.first + options.count)):
        try:
            row = fight(folder, case, reference)
        except AssertionError as error:
            num_failed += 1
            row = asdict(case) | {"error": str(error)[-4000:] or repr(error)}
        table.write(row)
        print(json.dumps(row), flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
