"""How SGLang servers are started: command line, placing on CPUs, and what a user without SGLang is told."""

import importlib.metadata
import json
import math
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.engines import engine_kind
from bapo_megatron.config.schema import Config
from bapo_megatron.engines import processes, sglang
from bapo_megatron.errors import EngineError, UserError
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import FAMILIES
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.preflight.checks.model import check_policy
from bapo_megatron.resolved import Resolved, resolve
from bapo_megatron.resolved.placement import Placement
from tests.distributed import HANG_S
from tests.hybrid_model import save_hybrid

SHARE = Placement(num_servers=1).on()
PAIR = Placement(num_servers=1, gpus_per_server=2).on()


def command(extra: dict[str, Any] | None = None, *, has_gpu: bool = False, **rollout: Any) -> list[str]:
    return sglang.command(resolve(settings(extra, **rollout), demo_model_path()), SHARE, 0, 1234, has_gpu=has_gpu)


def settings(extra: dict[str, Any] | None = None, **rollout: Any) -> Config:
    limits = {"max_response_tokens": 32, "max_concurrent_requests": 8}
    return Config.model_validate(
        {"data": {"max_prompt_tokens": 32}, "rollout": limits | rollout, "sglang": {"extra": extra or {}}}
    )


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_a_response_may_fill_the_context() -> None:
    arguments = command()
    assert option(arguments, "--context-length") == "66"
    assert option(arguments, "--port") == "1234"
    assert int(option(arguments, "--max-total-tokens")) >= 8 * 66


def test_servers_of_a_run_that_replays_routes_return_them() -> None:
    flag, plain = "--enable-return-routed-experts", settings()
    replaying = plain.model_copy(update={"model": plain.model.model_copy(update={"replay_routes": True})})
    assert flag in sglang.command(resolve(replaying, demo_model_path()), SHARE, 0, 1234, has_gpu=True)
    assert flag not in sglang.command(resolve(plain, demo_model_path()), SHARE, 0, 1234, has_gpu=True)


def test_a_family_that_sglang_lacks_is_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {}
    for name, path, known in (
        ("sglang", "srt/configs/a.py", "theirs"),
        ("transformers", "models/auto/b_auto.py", "hub"),
    ):
        (tmp_path / name / path).parent.mkdir(parents=True)
        (tmp_path / name / path).write_text(f'model_type = "{known}"')
        found[name] = SimpleNamespace(submodule_search_locations=[tmp_path / name])
    monkeypatch.setattr(sglang, "find_spec", found.get)
    hf_config = load_hf_config(demo_model_path())

    def told(model_type: str, engine: str = "sglang") -> list[str]:
        config = settings(engine=engine)
        config = config.model_copy(update={"model": config.model.model_copy(update={"family": "mine:FAMILY"})})
        own = replace(FAMILIES["qwen3"], model_type=model_type)
        run = Resolved(config, engine_kind(engine), own, ModelFacts(hf_config | {"model_type": model_type}, own))
        return [violation.message for violation in check_policy(run)]

    assert told("mine") == [
        'rollout.engine="sglang" does not serve model.family="mine:FAMILY": neither SGLang nor transformers knows '
        "model_type 'mine'; set rollout.engine=\"embedded\""
    ]
    assert told("theirs") == told("hub") == told("mine", "embedded") == []
    del found["sglang"]
    assert told("mine") == [], "SGLang is not installed"


def test_extra_arguments_have_the_last_word() -> None:
    extra = {
        "max_total_tokens": 100,
        "sleep_on_idle": False,
        "log_requests": True,
        "cuda_graph_bs": [1, 2],
        "m": {"a": 1},
    }
    arguments = command(extra)
    assert option(arguments, "--max-total-tokens") == "100"
    assert "--sleep-on-idle" not in arguments
    assert "--log-requests" in arguments
    start = arguments.index("--cuda-graph-bs")
    assert arguments[start : start + 3] == ["--cuda-graph-bs", "1", "2"]
    assert option(arguments, "--m") == '{"a": 1}'


def test_memory_that_others_take_meanwhile_ends_no_server_on_a_cpu() -> None:
    """SGLang compares the machine's free memory before and after it loads the weights, and between ranks."""
    assert float(option(command(), "--mem-fraction-static")) == 1.0
    assert option(command(), "--max-mamba-cache-size") == "32", "states would fill all memory"
    variables = sglang.environment(settings(server_tensor_parallel=2), SHARE, 0, [])
    assert variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"


def test_the_inputs_of_convolutions_are_kept_in_the_type_of_the_model() -> None:
    """SGLang's default is bfloat16."""
    variables = sglang.environment(settings(), SHARE, 0, [])
    assert variables["SGLANG_MAMBA_CONV_DTYPE"] == settings().model.dtype == "float32"


YARN = {"type": "yarn", "factor": 4, "rope_theta": 1e4, "attention_factor": 1.0, "beta_fast": None}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("published", "change", "expected"),
    [
        (False, {}, {"full_attention_interval": 2}),
        (False, {"full_attention_interval": 2}, None),
        (True, {}, {"language_model_only": True, "text_config": {"full_attention_interval": 2}}),
        (True, {"full_attention_interval": 2}, {"language_model_only": True}),
        (False, {"full_attention_interval": 2} | HALF, {"partial_rotary_factor": 0.5}),
        (
            False,
            {"full_attention_interval": 2, "dual_chunk_attention_config": {"chunk_size": 8}},
            {"dual_chunk_attention_config": None},
        ),
        (
            True,
            {"full_attention_interval": 2, "rope_scaling": YARN, "original_max_position_embeddings": 16},
            {
                "language_model_only": True,
                "text_config": {
                    "rope_scaling": None,
                    "rope_parameters": {
                        "rope_type": "yarn",
                        "rope_theta": 1e4,
                        "partial_rotary_factor": 0.25,
                        "factor": 4.0,
                        "original_max_position_embeddings": 16,
                        "attention_factor": 1.0,
                        "attn_factor": 1 / (0.1 * math.log(4) + 1),
                        "beta_fast": 32,
                        "beta_slow": 1,
                        "extrapolation_factor": 1,
                    },
                },
            },
        ),
    ],
)
def test_servers_are_told_what_they_would_not_read(
    published: bool, change: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    save_hybrid(tmp_path, 0, 64, published=published)
    file = tmp_path / "config.json"
    hf_config = json.loads(file.read_text())
    (hf_config["text_config"] if published else hf_config).update(change)
    file.write_text(json.dumps(hf_config))
    arguments = sglang.command(resolve(settings(), tmp_path), SHARE, 0, 1234, has_gpu=True)
    flag = "--json-model-override-args"
    assert (json.loads(option(arguments, flag)) if flag in arguments else None) == expected


def test_nothing_of_the_cpu_is_set_where_there_is_a_gpu() -> None:
    arguments = command(has_gpu=True, server_tensor_parallel=2)
    assert option(arguments, "--tensor-parallel-size") == "2"
    assert "--device" not in arguments
    assert "--enable-fp32-lm-head" in arguments, "log-probs of bfloat16 logits are coarse"
    assert "--enable-fp32-lm-head" not in command({"enable_fp32_lm_head": False}, has_gpu=True)
    variables = sglang.environment(settings(server_tensor_parallel=2), PAIR, 0, ["4", "5"])
    assert "SGLANG_USE_CPU_ENGINE" not in variables
    assert variables["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_servers_and_trainer_ranks_share_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r of the trainer uses visible GPU r (learner/parallel.py)."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sglang.visible_gpus(4) == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3,GPU-5,1")
    visible = sglang.visible_gpus(4)
    two = Placement(num_ranks=2, num_servers=2).on()
    assert [sglang.named_gpus(gpus, visible) for gpus in two.gpus] == [("GPU-5",), ("1",)]
    (wide,) = Placement(num_ranks=2, num_servers=1, gpus_per_server=2).on().gpus
    assert sglang.named_gpus(wide, visible) == ("GPU-5", "1")


def test_ranks_get_cpus_of_their_own_while_there_are_some() -> None:
    assert sglang.cpu_groups(0, 2, 1, [0, 1]) == ("0", "1")
    assert sglang.cpu_groups(1, 2, 2, range(8)) == ("4,5", "6,7")
    assert sglang.cpu_groups(1, 2, 1, [3, 5]) == ("3", "5")
    assert sglang.cpu_groups(0, 2, 4, [0, 1]) == ("0,1", "0,1")
    assert sglang.cpu_groups(0, 1, 4, range(8)) == ()


def test_a_reserved_port_can_be_served_on_and_is_not_given_twice() -> None:
    with processes.reserved_ports(2) as (port, other), socket.socket() as server:
        assert port != other
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, r"not installed.*install_sglang_cpu\.sh.*embedded"), ("0.6.0", r"0\.5\.23 is needed, but 0\.6\.0")],
)
def test_a_missing_or_foreign_sglang_is_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch, found: str | None, message: str
) -> None:
    def version(package: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=message):
        sglang.check_installed(has_gpu=False)


def test_a_server_that_ends_or_is_late_is_named_by_its_log(tmp_path: Path) -> None:
    def start(code: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / "engine.log"
        return processes.start([sys.executable, "-c", code], log), log

    for code, error, message in (
        ("print('no such flag'); raise SystemExit(2)", UserError, "refused to start: no such flag"),
        ("raise SystemExit(7)", EngineError, r"exit code 7.*engine\.log"),
        ("import signal; signal.pause()", EngineError, r"startup_timeout_s = 0.5 s.*engine\.log"),
    ):
        process, log = start(code)
        try:
            with pytest.raises(error, match=message):
                processes.wait_until(lambda: False, process, log, 0.5 if "pause" in code else HANG_S)
        finally:
            process.kill()
            processes.end([process])


def test_a_process_that_the_kernel_holds_is_told_of_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = processes.start([sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "engine.log")
    monkeypatch.setattr(processes, "END_TIMEOUT_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(processes.os, "killpg", lambda *_: None)  # as if SIGKILL had no effect yet
        processes.end([held])
    assert f"engine process {held.pid} has not ended 0.2 s after SIGKILL" in capsys.readouterr().err
    monkeypatch.setattr(processes, "END_TIMEOUT_S", HANG_S)
    processes.kill(held)
    assert held.returncode == -signal.SIGKILL


def test_an_engine_ends_when_its_input_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_TIMEOUT_S", HANG_S)
    process = processes.start([sys.executable, "-c", "import sys; sys.stdin.read()"], tmp_path / "engine.log")
    processes.end([process])
    assert process.returncode == 0
    stubborn = processes.start([sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "engine.log")
    monkeypatch.setattr(processes, "END_TIMEOUT_S", 0.5)
    processes.end([stubborn])
    assert stubborn.returncode == -signal.SIGKILL
