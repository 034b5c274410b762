#!/usr/bin/env bash
# A prepared hour on a machine with GPUs and no network, in stages of under ten minutes each.
#
#   scripts/gpu_session.sh correctness     doctor, tests/gpu, log-probs; meanwhile Transformer Engine is compiled
#   scripts/gpu_session.sh te              its attention and FP8: tests/gpu again, now with it
#   scripts/gpu_session.sh speed           updates of 1.5B and 7B sizes, and the ways out of the learner
#   scripts/gpu_session.sh two-gpus        trainer to SGLang over NCCL
#   scripts/gpu_session.sh --dry-run all   every stage with tiny sizes, on a CPU
#
# Each stage writes STAGE.json and STAGE.log into gpu-session/, and into OUT if that is set. A step that the machine
# cannot run is named in one line, and the rest goes on. A stage that is started again does what is not done yet.
# Exit code: 0, 1 after a step that failed, 75 where time ran out (start the stage again), 2 for a wrong argument.
#
#   BAPO_WHEELS   folder with wheels that the machine lacks, and with Transformer Engine's wheels and source
#   VENV, PYTHON  interpreter with torch (default: the active environment's, else python3)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_offline
export BAPO_SESSION="${BAPO_SESSION:-$ROOT/gpu-session}" OFFLINE
cd "$ROOT"
exec "$PY" scripts/gpu_session.py "$@"
