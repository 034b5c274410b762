"""A campaign of trainer ranks that die or hang in whole runs, at moments drawn from committed seeds.

    python -m tests.integration.restart_campaign FOLDER [--first 0] [--count 40]

Each case is one run of `bapo train` with run.max_restarts, and one line in FOLDER/cases.jsonl: what happened, what was
compared, and how long the run took to recover. Seeds 0 to 15 kill in every combination, 16 to 31 do so with ranks on
standby, and 32 to 39 stop a rank, which only parallel.timeout_s ends. On a busy machine it may end a good rank too.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bapo_megatron.assets import demo_model_path
from bapo_megatron.convert import hf_folder
from bapo_megatron.engines.processes import kill
from bapo_megatron.rollout.recorded import read_groups
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.restarts import restart_of
from bapo_megatron.runtime.files import JsonlWriter, read_jsonl
from tests.distributed import HANG_S
from tests.integration.campaign_oracle import check_logprobs
from tests.integration.gates import Gates
from tests.integration.killable import SMALL
from tests.integration.nursery import stop
from tests.integration.test_kill_resume import assert_same, buffered_in

NUM_STEPS = 4
SETTINGS = (*SMALL, f"train.num_steps={NUM_STEPS}", "run.max_restarts=3", "rollout.record=true")
LAYOUTS = {
    "TP2xDP2": ("parallel.tensor=2", "parallel.data=2"),
    "PP2": ("parallel.tensor=1", "parallel.pipeline=2"),
}
ENGINES = ("embedded", "sglang")
LAST = {"push": 150, "save": 40, "update": 7, "sample": 4}  # gates that every run reaches before its last step
SHORT = ("parallel.timeout_s=60", "sync.timeout_s=15")


@dataclass(frozen=True)
class Case:
    """One run, and the moment at which one of its ranks is killed or stopped."""

    seed: int
    layout: str
    engine: str
    place: str  # the gate in front of which a rank waits
    rank: int
    signal: str
    standby: bool

    @classmethod
    def draw(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        combinations = list(itertools.product(LAYOUTS, ENGINES, LAST))
        layout, engine, kind = combinations[seed * 5 % len(combinations)]
        place = f"{kind}-{rng.randint(1, LAST[kind])}"
        rank = rng.randrange(4 if layout == "TP2xDP2" else 2)
        is_stop = seed >= 2 * len(combinations)
        is_standby = bool(seed % 2) if is_stop else seed >= len(combinations)
        return cls(seed, layout, engine, place, rank, "STOP" if is_stop else "KILL", is_standby)


class Started:
    """`bapo train` with the demo. A context manager that ends what is left of it."""

    def __init__(self, folder: Path, name: str, *settings: str, gates: Gates | None = None) -> None:
        self.path = folder / name
        self.gates = gates
        self._output = folder / f"{name}.output"
        command = [sys.executable, "-m", "bapo_megatron", "train", "demo", f"run.dir={folder}", f"run.name={name}"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *SETTINGS, *settings],
                stdout=output,
                stderr=output,
                env=os.environ | (gates.environment if gates else {}),
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._output.read_text()

    def at_gate(self, place: int | str) -> None:
        assert self.gates is not None
        self.gates.wait(place, lambda: self.process.poll() is None, lambda: self.text)

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes that write to the trainers' logs, by rank."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(OSError):  # it has just ended
                if log := re.search(r"/trainer-(\d+)\.log$", os.readlink(f"/proc/{child.pid}/fd/1")):
                    found[int(log[1])] = child
        return found

    def engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "bapo_megatron.engines" in " ".join(child.cmdline())]

    def on_standby(self, used: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Return the processes that have imported everything, once there are as many as in `used`, all new."""
        assert self.gates is not None
        deadline = time.monotonic() + HANG_S
        while True:
            children = psutil.Process(self.process.pid).children()
            found = [child for child in children if child not in used and self.gates.is_standing_by(child.pid)]
            if len(found) == len(used):
                return found
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def wait(self) -> int:
        return self.process.wait(HANG_S)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        kill(self.process)


def reference(folder: Path, layout: str) -> Path:
    """Return a run of a layout that was left alone, with the embedded engine."""
    path = folder / f"alone-{layout}"
    if not path.exists() or RunDir.attach(path).state != "finished":
        with Started(folder, path.name, *LAYOUTS[layout]) as run:
            assert run.wait() == 0, run.text
    return path


def fight(folder: Path, case: Case) -> dict[str, Any]:
    """Run one case; return its line of the table."""
    settings = [*LAYOUTS[case.layout], f"rollout.engine={case.engine}", f"run.standby={str(case.standby).lower()}"]
    settings += SHORT if case.signal == "STOP" else []
    name = f"case-{case.seed}"
    for left in (name, f"gates-{name}"):  # left by an earlier campaign in this folder
        shutil.rmtree(folder / left, ignore_errors=True)
    with Started(folder, name, *settings, gates=Gates(folder / f"gates-{name}", case.place, "end")) as run:
        assert run.gates is not None
        run.at_gate(case.place)
        ranks, engines = run.ranks(), run.engines()
        if case.standby:
            run.on_standby(list(ranks.values()))
        struck_at_s = time.time()
        stop(ranks[case.rank].pid) if case.signal == "STOP" else ranks[case.rank].kill()
        run.gates.open(case.place)
        run.at_gate("end")
        assert run.engines() == engines, "the engines have changed"
        assert not any(rank.is_running() for rank in ranks.values())
        run.gates.open("end")
        assert run.wait() == 0, run.text
    is_equal = case.engine == "embedded"
    if is_equal:
        assert_same(run.path, reference(folder, case.layout), NUM_STEPS)
    num_trained = check_books(run.path)
    num_tokens, worst = check_labels(run.path)
    rows = read_jsonl(run.path / "metrics.jsonl")
    restart = restart_of(RunDir(run.path, 2))
    assert restart is not None
    return asdict(case) | {
        "restarts": rows[-1]["run/restarts"],
        "noticed_s": round(restart.failed_at_s - struck_at_s, 1),
        "recovery_s": round(max(row.get("run/recovery_s", 0.0) for row in rows), 1),
        "equal": is_equal,
        "responses": num_trained,
        "tokens": num_tokens,
        "worst": worst,
        "load": round(os.getloadavg()[0], 1),
    }


def check_books(run: Path, num_steps: int = NUM_STEPS) -> int:
    """Check that no response was lost or trained twice; return how many were trained."""
    trained: set[str] = set()
    for step in range(1, num_steps + 1):
        now = [sample.sample_id for group in read_groups(run / "rollouts", step) for sample in group.samples]
        assert len(now) == len(set(now)) == 16
        assert not trained & set(now), "trained twice"
        trained |= set(now)
        buffered_in(run, step, trained)
    return len(trained)


def check_labels(run: Path) -> tuple[int, float]:
    """Check each trained token against the weights that its segment claims; return token count and worst difference."""
    samples = [s for step in range(1, NUM_STEPS + 1) for g in read_groups(run / "rollouts", step) for s in g.samples]
    weights = dict(pushed(run))
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()

    def model_of(version: int) -> Any:
        model.load_state_dict(weights[version])
        return model

    checked = check_logprobs(model_of, samples, 1.0)
    return checked.num_tokens, checked.worst


def pushed(run: Path) -> list[tuple[int, dict[str, Tensor]]]:
    """Return the weights of each version that engines received, from the checkpoints."""
    found = [(0, load_file(next(demo_model_path().glob("*.safetensors"))))]
    for step in range(1, NUM_STEPS + 1):
        with hf_folder(run / "checkpoints" / f"step-{step:06d}") as (folder, version):
            assert version is not None
            found.append((version, load_file(next(folder.glob("*.safetensors")))))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.integration.restart_campaign")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=40, help="number of seeds")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    table = JsonlWriter(options.folder / "cases.jsonl")
    recovered: dict[bool, list[float]] = {False: [], True: []}
    num_failed = 0
    for seed in range(options.first, options.first + options.count):
        case = Case.draw(seed)
        try:
            row = fight(options.folder.absolute(), case)
            recovered[case.standby].append(row["recovery_s"])
        except AssertionError as error:
            num_failed += 1
            row = asdict(case) | {"error": str(error)[-4000:] or repr(error)}
        table.write(row)
        print(json.dumps(row), flush=True)
    for is_standby, times_s in recovered.items():
        if times_s:
            how = "from standby" if is_standby else "started anew"
            print(f"{how}: {statistics.median(times_s):.1f} s to recover (median of {len(times_s)}; {max(times_s)} s)")
    return 1 if num_failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
