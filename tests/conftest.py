"""Set-up for all tests."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The objects of imports and of collection stay: visiting them again and again takes a quarter of that time.
gc.disable()

# Triton reads this when it is imported, which Megatron does if it is installed: without a GPU, interpret its kernels.
# And as in a rank there, torch compiles none of Megatron's functions, which takes longer than a test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# By default, threads of torch that wait for each other keep their cores busy, which other processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# As in an active environment, so that printed commands begin with the name of the program, not with its path.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# pytest-xdist gives its workers the width of its own terminal; tests have terminals of their own.
os.environ.pop("COLUMNS", None)

# What a shell starts in the background ignores Ctrl-C, and after nohup a hangup. Processes of tests would inherit this,
# but a signal that has a handler here gets its default meaning in them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# A busy machine must not fail a test: by default, hypothesis allows 0.2 s per example. The same examples are tried each
# time; `pytest --hypothesis-profile=search` tries others.
hypothesis.settings.register_profile(
    "search", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.register_profile("bapo", hypothesis.settings.get_profile("search"), derandomize=True)
hypothesis.settings.load_profile("bapo")

# The slowest files, longest first: workers take whole files in this order, so none of these may come last.
_FIRST = (
    *("test_engine_contract.py", "test_slurm.py", "test_fault_campaign.py", "test_smollm2.py"),
    *("test_restart_campaign.py", "test_process_faults.py", "test_own_functions.py", "test_restarted_runs.py"),
    *("test_readme.py", "test_layouts.py", "test_sandbox_attacks.py", "test_check_fuzz.py"),
    *("test_rollout_benchmark.py", "test_reward_hooks.py", "test_clip_bounds.py"),
)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """Restore the number of torch's threads, which a command that runs in this process may change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if importlib.util.find_spec("reasoning_gym") is None and "CI" not in os.environ:  # in CI they would fail
        skip = pytest.mark.skip(reason="reasoning-gym is not installed: pip install -e '.[gym]', with a C compiler")
        for item in items:
            if item.get_closest_marker("gym"):
                item.add_marker(skip)
