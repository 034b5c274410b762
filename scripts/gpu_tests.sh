#!/usr/bin/env bash
# Everything that needs a GPU, in one command: tests/gpu, the tests of kernels, and torch and Triton side by side.
# Set BAPO_TRANSFORMER_ENGINE=1 to compile Transformer Engine and apex first (scripts/install_gpu.sh); otherwise its
# tests skip and say why. Set BAPO_OFFLINE=1 on a machine without a network: the tests use what is there, and packs
# (scripts/gpu_session.sh pack).
# Arguments are passed to pytest.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v nvidia-smi >/dev/null || fail "nvidia-smi was not found: these tests need a GPU"
if [[ -n "${BAPO_OFFLINE:-}" ]]; then
    [[ -z "${BAPO_TRANSFORMER_ENGINE:-}" ]] || fail "BAPO_TRANSFORMER_ENGINE needs a network; unset BAPO_OFFLINE"
    use_offline serve fla
else
    use_environment
    install_checkout dev
fi
cd "$ROOT"
"$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "this torch sees no GPU; install a CUDA build of it (BAPO_TORCH_SPEC, BAPO_TORCH_INDEX)"
if [[ -n "${BAPO_TRANSFORMER_ENGINE:-}" ]]; then
    VENV="$VIRTUAL_ENV" "$ROOT/scripts/install_gpu.sh" compiled
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
say "tests"
"$PY" -m pytest -rs -m gpu tests/gpu "$@"
"$PY" -m pytest -rs tests/unit/test_logprobs_triton.py
say "torch and Triton"
"$PY" -m benchmarks.logprobs time --size 7b --device cuda --backend both
