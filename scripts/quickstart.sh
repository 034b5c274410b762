#!/usr/bin/env bash
# Set up, then watch a small policy learn with BAPO on this machine's CPU. Safe to run again; arguments are settings of
# the demo, such as train.num_steps=5. scripts/common.sh lists the environment variables.
set -euo pipefail

case "${1:-}" in
    -h | --help)
        echo "usage: scripts/quickstart.sh [KEY=VALUE ...]"
        sed -n '2,/^set/{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
        exit
        ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_environment
install_checkout train
cd "$ROOT"
say "bapo demo $*"
exec "$PY" -m bapo_megatron demo "$@"
