#!/usr/bin/env bash
# Set up, then run linters, type checker and tests.
#
#   scripts/test.sh             the quick tests: every real part once, at most 10 minutes on two quiet cores
#   scripts/test.sh --all       all tests
#   scripts/test.sh --rest      only the tests that --all adds, without linters
#   scripts/test.sh --learner   only the learner's tests: layouts, updates, checkpoints; without linters
#   scripts/test.sh ARGUMENTS   pass the arguments to pytest: scripts/test.sh tests/unit -k bounds
set -euo pipefail

case "${1:-}" in
    -h | --help)
        sed -n '2,/^set/{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
        exit
        ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

QUICK="not slow or quick"
LEARNER=(
    tests/integration/test_{learner,learner_attention,learner_mismatch,learner_updates,layouts,schedule,recompute}.py
    tests/integration/test_{bfloat16,critic,turns,streams,overlap_communication,chained_adam,update_rule,train}.py
    tests/integration/test_{fusions,transformer_engine,checkpoint_shards,memory_plan,microbatch_bounds,no_waiting}.py
    tests/integration/test_{patches_megatron,rivals_learner,mean_over_learner,teacher_learner,hf_roundtrip,lora,offload}.py
)
SHARED=(--numprocesses=3 --dist=loadfile --no-loadscope-reorder)  # tests spend half of their time waiting for processes

use_environment
extras=dev,sglang  # the contract suite runs against real servers too
if can_compile; then
    extras=dev,gym,sglang
else
    say "no C compiler or no Python headers: leaving out the tests of reasoning-gym (apt install gcc python3-dev)"
fi
install_sglang_cpu "$extras"
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

lint() {
    say "ruff"
    "$PY" -m ruff check .
    "$PY" -m ruff format --check .
    say "import-linter"
    lint-imports
    say "mypy"
    "$PY" -m mypy
}

tests() {
    say "pytest $*"
    "$PY" -m compileall -q bapo_megatron patches tests  # hundreds of processes start, and Python may keep nothing itself
    "$PY" -m pytest "$@"
}

case "${1:-}" in
    --all) lint && tests "${@:2}" ;;
    --rest) tests "${SHARED[@]}" -m "not ($QUICK)" "${@:2}" ;;
    --learner) tests "${SHARED[@]}" "${@:2}" "${LEARNER[@]}" ;;
    "") lint && tests "${SHARED[@]}" -m "$QUICK" ;;
    *) lint && tests "$@" ;;
esac
