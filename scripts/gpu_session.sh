#!/usr/bin/env bash
# A prepared hour on a machine with GPUs and no network, in stages of under ten minutes each.
#
#   scripts/gpu_session.sh correctness     doctor, tests/gpu, log-probs; compiles Transformer Engine in the background
#   scripts/gpu_session.sh te              attention and FP8 of Transformer Engine: tests/gpu again, now with it
#   scripts/gpu_session.sh speed           updates of 1.5B and 7B sizes, and the ways to move weights out of the learner
#   scripts/gpu_session.sh two-gpus        trainer to SGLang over NCCL
#   scripts/gpu_session.sh --dry-run all   every stage with tiny sizes, on a CPU
#
# Each stage writes STAGE.json and STAGE.log into gpu-session/, and into OUT if that is set. If the machine cannot run a
# step, one line says why, and the stage continues. A stage that is started again does only what is not done yet.
# Exit code: 0, 1 if a step failed, 75 if time ran out (start the stage again), 2 for a wrong argument.
#
#   BAPO_WHEELS   folder with wheels that the machine lacks, and with Transformer Engine's wheels and source
#   VENV, PYTHON  interpreter with torch (default: the active environment's, or python3)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_offline
export BAPO_SESSION="${BAPO_SESSION:-$ROOT/gpu-session}" OFFLINE
cd "$ROOT"
exec "$PY" scripts/gpu_session.py "$@"
