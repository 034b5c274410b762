"""Settings of processes on GPUs that can be checked without one: variables, SGLang's arguments, Adam's kernel."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from bapo_megatron import trainer
from bapo_megatron.checkpoint.folder import SQUARES
from bapo_megatron.config.engines import engine_kind
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import sglang
from bapo_megatron.learner.adam import AdamState
from bapo_megatron.learner.host_copies import HostCopies
from bapo_megatron.learner.policy import PolicyModel
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.runtime import environment
from bapo_megatron.runtime.environment import TRAINER_VARIABLES, nccl_variables, trainer_variables
from bapo_megatron.runtime.heartbeat import HEARTBEAT
from tests.distributed import HANG_S

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
NAMES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "PYTORCH_CUDA_ALLOC_CONF", *TRAINER_VARIABLES, *CACHES)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def of_engine(**extra: object) -> dict[str, str]:
    config = Config.model_validate({"sglang": {"extra": extra}})
    variables = sglang.environment(config, Placement(num_servers=1, num_ranks=1).on(), 0, ["0", "1"])
    return {name: value for name, value in variables.items() if name in NAMES}


@pytest.mark.parametrize(
    ("extra", "values"),
    [({}, "00"), ({"enable_nccl_nvls": True}, "11"), ({"enable_symm_mem": True}, "11")],
)
def test_trainer_and_engines_get_the_same_of_nccl(extra: dict[str, bool], values: str) -> None:
    """This is SGLang's own rule, srt/entrypoints/engine.py, except that multicast also gets the memory it needs."""
    same = nccl_variables(extra)
    assert "".join(same.values()) == values
    assert of_engine(**extra) == same
    trainer = trainer_variables(extra)
    assert {name: trainer[name] for name in same} == same
    assert trainer.keys() - same.keys() - {"TORCHDYNAMO_DISABLE"} == TRAINER_VARIABLES.keys()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_compiler_is_for_gpus(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(environment, "has_gpu_driver", lambda: has_gpu)
    assert trainer_variables({}).get("TORCHDYNAMO_DISABLE") == (None if has_gpu else "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    assert trainer_variables({}).get("TORCHDYNAMO_DISABLE") == (None if has_gpu else "0")


def test_compiled_kernels_stay_with_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not {*CACHES} & trainer_variables({}, run_dir=tmp_path).keys(), "nothing is compiled on a CPU"
    monkeypatch.setattr(environment, "has_gpu_driver", lambda: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/image/triton")
    monkeypatch.chdir(tmp_path)
    variables = trainer_variables({}, run_dir=Path("runs"))
    assert [variables[name] for name in CACHES] == [f"{tmp_path}/runs/.compiled/inductor", "/image/triton"]


def nvml_of(near: dict[str, list[int]]) -> SimpleNamespace:
    """Return a stand-in for pynvml whose GPUs, by index and UUID, have these masks of near CPUs."""

    def handle(gpu: int | str) -> str:
        if str(gpu) not in near:
            raise RuntimeError("Invalid Argument")
        return str(gpu)

    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetCpuAffinity=lambda gpu, num_words: near[gpu][:num_words],
    )


@pytest.mark.parametrize(
    ("visible", "local_rank", "cpus", "said"),
    [
        (None, 0, {2, 3}, "CPUs next to GPU 0: 2"),  # CPU 1 is near, and not for this process
        (None, 1, {64, 70}, "CPUs next to GPU 1: 2"),
        ("1,0", 1, {2, 3}, "CPUs next to GPU 0: 2"),
        ("GPU-5e", 0, {64}, "CPUs next to GPU GPU-5e: 1"),
        (None, 2, None, "any CPU: this process may use none of the 1 next to GPU 2"),
        (None, 7, None, "any CPU: the driver does not name the CPUs next to the GPU (Invalid Argument)"),
        ("0", 1, None, "any CPU: the driver does not name the CPUs next to the GPU (list index out of range)"),
    ],
)
def test_a_rank_runs_next_to_its_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, local_rank: int, cpus: set[int] | None, said: str
) -> None:
    bound: list[set[int]] = []
    near = {"0": [0b1110, 0], "1": [0, 0b1000001], "2": [1, 0], "GPU-5e": [0, 1]}
    monkeypatch.setitem(sys.modules, "pynvml", nvml_of(near))
    monkeypatch.setattr(os, "cpu_count", lambda: 72)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 64, 65, 70})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (environment.bind_to_gpu(local_rank), bound) == (said, [cpus] if cpus else [])


def test_a_deterministic_run_has_products_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    assert name not in trainer_variables({})
    assert trainer_variables({}, deterministic=True)[name] == ":4096:8"
    monkeypatch.setenv(name, ":16:8")
    assert trainer_variables({}, deterministic=True)[name] == ":16:8"


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_a_trainer_imports_no_compiler_where_it_is_disabled_and_no_wandb(disabled: str) -> None:
    program = (
        "import sys, torch; compile = torch.compile; import bapo_megatron.train; assert torch.compile is compile; "
        "print([name in sys.modules for name in ('megatron.core', 'torch._inductor', 'wandb')])"
    )
    variables = os.environ | {"TORCHDYNAMO_DISABLE": disabled}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.stdout.strip(), done.returncode) == (str([True, disabled == "0", False]), 0), done.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('Found empty `transformer-engine` meta package.')", "RuntimeError: Found empty"),
        # As Transformer Engine does: its __init__ hides that its part for torch does not load.
        ("try:\n    from . import pytorch\nexcept ImportError:\n    pass", "ImportError: undefined symbol: _ZN3c10"),
    ],
)
def test_a_broken_transformer_engine_is_one_error_with_the_way_out(tmp_path: Path, code: str, reason: str) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text(f"{code}\n")
    (package / "pytorch" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    program = (
        "from bapo_megatron.errors import UserError\n"
        "try:\n    import bapo_megatron.learner.parallel\n"
        "except UserError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.startswith("Transformer Engine does not load with torch "), done.stderr
    assert reason in done.stdout
    assert "scripts/install_gpu.sh compiled" in done.stdout


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert of_engine() == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    trainer = trainer_variables({})
    assert (trainer["NCCL_CUMEM_ENABLE"], trainer["NVTE_UNFUSED_ATTN"]) == ("1", "1")
    assert "PYTORCH_ALLOC_CONF" not in trainer, "it would hide the older name"


def test_a_rank_sets_them_before_it_imports_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    bound: list[int] = []

    def beat(*_: object) -> None:
        seen.update(os.environ)
        raise InterruptedError

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(HEARTBEAT, "beat", beat)  # "importing torch and Megatron-Core"
    monkeypatch.setattr("bapo_megatron.config.load.load_config", lambda *_: Config())
    monkeypatch.setattr(trainer, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(trainer, "bind_to_gpu", lambda local_rank: bound.append(local_rank))
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(InterruptedError):
        trainer.train_on_rank(SimpleNamespace(config_path=tmp_path), [], 0, None, None)  # type: ignore[arg-type]
    assert trainer_variables({}).items() <= seen.items()
    assert bound == [3]
    unbound = Config.model_validate({"parallel": {"bind_cpus": False}})
    monkeypatch.setattr("bapo_megatron.config.load.load_config", lambda *_: unbound)
    with pytest.raises(InterruptedError):
        trainer.train_on_rank(SimpleNamespace(config_path=tmp_path), [], 0, None, None)  # type: ignore[arg-type]
    assert bound == [3]


def test_the_launchers_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, bapo_megatron.local, bapo_megatron.trainer, bapo_megatron.slurm.node;"
        "print(sorted({'torch', 'numpy', 'megatron'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "[]"


def test_megatron_does_not_turn_unfused_attention_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("FLASH", "FUSED", "UNFUSED"):  # Megatron sets all three, for good
        monkeypatch.setenv(f"NVTE_{kind}_ATTN", "0")
    model = PolicyModel.__new__(PolicyModel)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(attention_backend=AttnBackend.auto)
    model._set_attention_backend()
    assert os.environ["NVTE_UNFUSED_ATTN"] == "0"
    model.config = SimpleNamespace(attention_backend=AttnBackend.unfused)  # [megatron.extra]
    with pytest.raises(AssertionError, match="NVTE_UNFUSED_ATTN set to 0"):
        model._set_attention_backend()


def test_adam_is_fused_and_counts_where_its_weights_are() -> None:
    """The device "meta" stands in for a GPU: torch's fused kernel takes its counts from there."""
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW([weight]))
    adam = AdamState(optimizer, None, HostCopies())  # type: ignore[arg-type]
    (group,) = optimizer.optimizer.param_groups
    assert group["fused"]
    adam.local(weight, SQUARES)  # creates the state
    assert optimizer.optimizer.state[weight]["step"].device.type == "meta"
    adam.set_steps(7)
    assert optimizer.optimizer.state[weight]["step"].device.type == "meta"


@pytest.mark.parametrize(
    ("rollout", "limit_s"),
    [({"engine": "sglang"}, 1800), ({}, 180), ({"engine": "sglang", "startup_timeout_s": 60}, 60)],
)
def test_a_first_start_of_sglang_may_take_half_an_hour(rollout: dict[str, object], limit_s: float) -> None:
    config = Config.model_validate({"rollout": rollout})
    assert engine_kind(config.rollout.engine).startup_limit_s(config.rollout.startup_timeout_s) == limit_s
