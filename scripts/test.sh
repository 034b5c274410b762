#!/usr/bin/env bash
# Set up, then run linters, type checker and tests. Arguments go to pytest: scripts/test.sh -m "not slow" tests/unit
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_environment
install_sglang_cpu dev,sglang  # the contract suite runs against real servers too
cd "$ROOT"
say "ruff"
"$PY" -m ruff check .
"$PY" -m ruff format --check .
say "import-linter"
lint-imports
say "mypy"
"$PY" -m mypy
say "pytest $*"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PY" -m pytest "$@"
