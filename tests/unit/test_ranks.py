"""The cores of a process, and how trainer and engines share them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import start
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime import num_cores
from tests.distributed import HANG_S


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_cores_that_a_process_may_not_use_do_not_count():
    assert num_cores() == len(os.sched_getaffinity(0))
    bound = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = f"{bound}; from bapo_megatron.runtime import num_cores; print(num_cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "1"


def threads(num_cores: int, num_ranks: int, num_engines: int, **rollout: object) -> tuple[int, int]:
    per_rank = rollout.pop("threads_per_rank", None)
    config = Config.model_validate({"rollout": {"overlap": True} | rollout, "parallel": {"threads_per_rank": per_rank}})
    return config.divide_cores(num_cores, num_ranks, num_engines)


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8, 13, 96])
@pytest.mark.parametrize(("num_ranks", "num_engines"), [(1, 1), (2, 1), (1, 2), (3, 4)])
def test_trainer_and_engines_that_run_at_once_share_the_cores(num_cores: int, num_ranks: int, num_engines: int) -> None:
    per_rank, per_engine = threads(num_cores, num_ranks, num_engines)
    assert min(per_rank, per_engine) >= 1
    if num_cores >= 2 * max(num_ranks, num_engines):
        assert per_rank * num_ranks + per_engine * num_engines <= num_cores


def test_by_turns_each_side_has_all_cores() -> None:
    assert threads(8, 2, 1, overlap=False) == (4, 8)
    assert threads(8, 0, 2) == (8, 4), "engines alone on their machine"
    assert threads(8, 2, 0) == (4, 8), "engines on another machine"


def test_settings_win_and_the_other_side_has_the_rest() -> None:
    assert threads(8, 2, 1) == (2, 4)
    assert threads(8, 2, 1, threads_per_rank=3) == (3, 2)
    assert threads(8, 2, 1, engine_threads=2) == (3, 2)
    assert threads(2, 1, 1, engine_threads=2, threads_per_rank=2) == (2, 2)


def test_processes_are_started_with_these_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "num_cores", lambda: 8)
    config = Config.model_validate({"rollout": {"overlap": True, "max_staleness": 5}})
    logs = [tmp_path / "engine-0.log"]
    for num_ranks, num_threads in ((0, "8"), (2, "4")):
        (spec,) = start.embedded_specs(
            resolve(config, demo_model_path()), logs, [30000], Placement(num_servers=1, num_ranks=num_ranks).on()
        )
        assert spec.command[spec.command.index("--threads") + 1] == num_threads


@pytest.mark.parametrize("was_enabled", [True, False])
def test_what_is_imported_at_a_start_is_never_visited_by_the_garbage_collector(was_enabled: bool) -> None:
    code = f"""if True:
        import gc
        if not {was_enabled}: gc.disable()
        from bapo_megatron.runtime import starting
        visits = []
        gc.callbacks.append(lambda phase, info: visits.append(phase))
        try:
            with starting():
                kept = [[] for _ in range(100_000)]
                assert not visits
                raise KeyError
        except KeyError:
            pass
        assert gc.isenabled() == {was_enabled}
        assert gc.get_freeze_count() > 100_000
        assert len(gc.get_objects()) < 1000
        visits.clear()
        kept.extend([] for _ in range(9_000))
        assert not visits
        kept.extend([] for _ in range(9_000))
        assert visits == {["start", "stop"] * was_enabled}
    """
    subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=True)


def test_a_rank_leaves_with_its_output_and_without_python_s_shutdown() -> None:
    program = """
import atexit
from bapo_megatron.trainer import leave
atexit.register(print, "shut down")
print("last line", end="")
leave(75)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "last line", "")
