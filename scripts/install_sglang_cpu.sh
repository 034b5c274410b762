#!/usr/bin/env bash
# Install SGLang on a machine without a GPU, next to bapo-megatron, so that rollout.engine=sglang works. Safe to run
# again. Takes about two minutes and 0.5 GB more than the checkout alone. scripts/common.sh lists the environment
# variables. A machine with GPUs needs scripts/install_gpu.sh instead.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_environment
install_sglang_cpu
say "try: bapo train configs/demo.toml rollout.engine=sglang rollout.num_servers=2 train.num_steps=5"
