#!/usr/bin/env bash
# Set up a machine with GPUs: the trainer and SGLang in one environment, and what is compiled against the torch that
# SGLang pins. Not run as a whole on a GPU machine yet: docs/status.md.
#
#   scripts/install_gpu.sh             all three steps
#   scripts/install_gpu.sh packages    torch, SGLang, Megatron-Core, transformers
#   scripts/install_gpu.sh compiled    Transformer Engine and apex, against the installed torch
#   scripts/install_gpu.sh checkout    this checkout
#
# It needs Python 3.12 or newer, git, a C++ compiler with Python's headers, and the CUDA toolkit that torch was built
# with (CUDA_HOME, or nvcc on PATH). MAX_JOBS limits the compilers, TORCH_CUDA_ARCH_LIST the GPUs they compile for.
# scripts/common.sh lists the other variables. docker/Dockerfile.gpu runs the steps one by one.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PINS="$ROOT/requirements/gpu.txt"

pip_install() {
    "$PY" -m pip install --disable-pip-version-check --constraint "$PINS" "$@"
}

# SGLang brings torch. Every step has the same constraints, so that none replaces what an earlier one installed.
packages() {
    say "installing torch, SGLang, Megatron-Core and transformers"
    pip_install torch megatron-core transformers sglang
}

compiled() (  # in a shell of its own, for its variables
    local nvcc="${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" toolkit torch cudnn nccl
    torch="$("$PY" -c 'import torch; print(torch.version.cuda or "")')" || fail "torch is missing; run: $0 packages"
    [[ -n "$torch" ]] || fail "this torch was built without CUDA; run: $0 packages"
    command -v "$nvcc" >/dev/null || fail "nvcc was not found; install the CUDA toolkit $torch and set CUDA_HOME"
    toolkit="$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')"
    [[ "$toolkit" == "$torch" ]] ||
        fail "torch was built with CUDA $torch, and nvcc is of CUDA $toolkit; set CUDA_HOME to the toolkit $torch"
    can_compile || fail "a C++ compiler and Python's headers are needed (apt install build-essential python3-dev)"
    pip_install setuptools wheel pybind11 ninja
    # torch brings the headers of cuDNN and NCCL; CUDA 13 keeps CCCL's headers in a folder of their own.
    cudnn="$("$PY" -c 'import nvidia.cudnn; print(nvidia.cudnn.__path__[0])')"
    nccl="$("$PY" -c 'import nvidia.nccl; print(nvidia.nccl.__path__[0])')"
    export CUDNN_PATH="$cudnn" NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE
    export CPLUS_INCLUDE_PATH="$cudnn/include:$nccl/include${CUDA_HOME:+:$CUDA_HOME/include/cccl}"
    say "compiling Transformer Engine"
    # Without isolation: in an environment of its own, pip would compile it against the newest torch.
    pip_install --no-build-isolation "transformer-engine[pytorch]"
    say "compiling apex"
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="${MAX_JOBS:-4}" \
        pip_install --no-build-isolation --no-deps "$(grep '^apex @' "$PINS")"
    "$PY" -c 'import torch, transformer_engine.pytorch' || fail "Transformer Engine was compiled but cannot be imported"
)

checkout() {
    say "installing the checkout"
    pip_install setuptools wheel
    pip_install --no-build-isolation --editable "${ROOT}[train,parquet,datasets]" nvidia-ml-py
}

case "${1:-all}" in
    packages | compiled | checkout | all) ;;
    *) fail "$0 packages, compiled or checkout; without a word, all three; got $1" ;;
esac
use_environment
"$PY" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
    fail "$("$PY" --version) is too old: requirements/gpu.txt has the versions for Python 3.12 and newer (set PYTHON)"
if [[ "${1:-all}" == all ]]; then
    packages
    compiled
    checkout
else
    "$1"
fi
