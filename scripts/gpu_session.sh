#!/usr/bin/env bash
# A prepared hour on a machine with GPUs and no network, in stages of under ten minutes each, in this order.
#
#   scripts/gpu_session.sh pack [NAME ...] beforehand, with a network: what the machine will lack (gpu_packing.py)
#   scripts/gpu_session.sh check-packs     beforehand: packs in an empty Python 3.12 (check_packs.py)
#   scripts/gpu_session.sh correctness     doctor, tests/gpu, log-probs; compiles Transformer Engine in the background
#   scripts/gpu_session.sh te              attention and FP8 of Transformer Engine: tests/gpu again, now with it
#   scripts/gpu_session.sh speed           updates of 1.5B and 7B sizes, and the operators that take longest
#   scripts/gpu_session.sh bits            ways to move weights out of the learner; an update repeated bit for bit
#   scripts/gpu_session.sh train           two steps of a whole run in bfloat16 with Transformer Engine
#   scripts/gpu_session.sh two-gpus        trainer to SGLang over NCCL
#   scripts/gpu_session.sh --dry-run all   every stage with tiny sizes, on a CPU
#
# Before the first step, one line names every package that is missing, and nothing starts. Each stage writes STAGE.json
# and STAGE.log into gpu-session/, and into OUT if that is set; losses-GPU.json has each update's loss, bounds and gradient
# norm. A copy of it in benchmarks/ is what the next session on such a GPU is compared with. If the machine cannot run a
# step, one line says why, and the stage continues. A stage that is started again does only what is not done yet.
# Exit code: 0; 1 if a step failed or has other losses; 75 if time ran out (start the stage again); 2 for a wrong
# argument or a missing package.
#
#   BAPO_PACKS    folder of the packs (default: .packs in the checkout)
#   VENV, PYTHON  interpreter with torch (default: the active environment's, or python3)
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ "${1:-}" == pack ]]; then
    exec "${PYTHON:-python3}" "$ROOT/scripts/gpu_packing.py" "$@"
fi
if [[ "${1:-}" == check-packs ]]; then
    exec "${PYTHON:-python3}" "$ROOT/scripts/check_packs.py" "${@:2}"
fi
use_offline serve te fla
export BAPO_SESSION="${BAPO_SESSION:-$ROOT/gpu-session}"
cd "$ROOT"
"$PY" scripts/gpu_packing.py missing
exec "$PY" scripts/gpu_session.py "$@"
