#!/usr/bin/env bash
# A prepared machine with one GPU and no network, in stages of under eight minutes each, in order of value. A quarter of
# an hour holds the first loan's stages, another one the second's:
#
#   scripts/gpu_session.sh pack [NAME ...] beforehand, with a network: what the machine lacks, in pieces (gpu_packing.py)
#   scripts/gpu_session.sh check-packs     beforehand: packs in an empty Python 3.12 (check_packs.py)
#
#   scripts/gpu_session.sh turns         first: 30 steps of the demo; SGLang and trainer have one GPU in turns
#   scripts/gpu_session.sh c1            first: several NCCL ranks on one GPU: TP2, DP2, a weight push to SGLang
#   scripts/gpu_session.sh c3            first: two servers, a broadcast that one never joins, a rank killed
#   scripts/gpu_session.sh c2            second: PP2, CP2, EP2, TP2 x PP2
#   scripts/gpu_session.sh d             second: updates at 7B's sizes, a profile of 1.5B, the optimizer's peak
#   scripts/gpu_session.sh a             later: SGLang and trainer on one GPU: three pushes, and log-probs compared
#   scripts/gpu_session.sh b             later: as turns, but each has a part of the GPU's memory
#   scripts/gpu_session.sh e             later: experts with and without one grouped kernel
#   scripts/gpu_session.sh linear        later: flash-linear-attention
#   scripts/gpu_session.sh smollm2       later: SmolLM2-135M, 20 steps
#   scripts/gpu_session.sh correctness   later: doctor, tests/gpu, log-probs; compiles Transformer Engine
#   scripts/gpu_session.sh te            later: attention and FP8 of Transformer Engine: tests/gpu again, now with it
#   scripts/gpu_session.sh bits          later: ways to move weights out; an update repeated bit for bit
#   scripts/gpu_session.sh train         later: two steps of a whole run in bfloat16 with Transformer Engine
#   scripts/gpu_session.sh two-gpus      later: trainer to SGLang over NCCL
#   scripts/gpu_session.sh --dry-run a b every step with tiny sizes, on a CPU; "all" names all stages
#
# Before the first step, one line names a package or a pack that is missing, and nothing starts. Each result is one line
# of JSON, printed immediately. Each stage writes STAGE.json and STAGE.log into gpu-session/, and into OUT if that is set,
# where STAGE.jsonl has the lines; losses-GPU.json has each update's loss, bounds and gradient norm. A copy of it in
# benchmarks/ is what the next session on such a GPU is compared with. If the machine cannot run a step, one line says
# why, and the stage continues. A stage that is started again does only what is not done yet.
# Exit code: 0; 1 if a step failed or has other losses; 75 if time ran out (start the stage again); 2 for a wrong
# argument, or a missing package or pack.
#
#   BAPO_PACKS    folder of the packs (default: .packs in the checkout)
#   BAPO_STAGE_S  seconds after which a stage ends (default: 480)
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
