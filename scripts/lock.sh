#!/usr/bin/env bash
# Write requirements/EXTRA.lock: each package that an extra of setup.py needs, with the digests of its files. Run this
# after changing setup.py or requirements/*.txt, and commit the result. Needs uv (pip install uv) and the package index.
# Arguments, such as --upgrade, are passed to uv. Without --upgrade, packages keep the versions in the lock.
#
# train.lock is complete; the other locks list what their extra needs beyond it. No lock has torch or what only its CUDA
# build needs: torch comes from its own index or is already installed. scripts/common.sh says where locks are used.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_environment
command -v uv >/dev/null || fail "uv was not found: pip install uv"
cd "$ROOT"

UV=(uv pip compile --quiet --generate-hashes --no-annotate --python-version "$LOCKED_PYTHON"
    --constraint requirements/cpu.txt --custom-compile-command scripts/lock.sh
    --no-emit-package torch --only-binary :all: "$@")
FROM_SOURCE=(--no-binary=pycosat --no-binary=cellpylib --no-binary=zss)  # reasoning-gym needs them; no wheels
FOLDER="$(mktemp -d)"
trap 'rm -r "$FOLDER"' EXIT

# Print the requirements of extras.
needs() {
    "$PY" - "$@" <<'EOF'
import runpy, sys
from unittest.mock import patch

with patch("setuptools.setup") as setup:
    runpy.run_path("setup.py")
given = setup.call_args.kwargs
print(*given["install_requires"], *(r for extra in sys.argv[1:] for r in given["extras_require"][extra]), sep="\n")
EOF
}

# Lock one extra for machines with at least the given glibc. Further arguments are passed to uv.
lock() {
    say "requirements/$1.lock"
    needs train "$1" >"$FOLDER/$1.in"
    "${UV[@]}" --python-platform "x86_64-manylinux_$2" "${@:3}" --output-file "requirements/$1.lock" "$FOLDER/$1.in"
    sed -i '/^# The following packages were excluded/,$ d' "requirements/$1.lock"
}

lock train 2_28
mapfile -t in_train < <(sed -nE 's/^([a-z0-9.-]+)==.*/--no-emit-package=\1/p' requirements/train.lock)
lock dev 2_28 "${in_train[@]}"
lock docs 2_28 "${in_train[@]}"
lock gym 2_28 "${FROM_SOURCE[@]}" "${in_train[@]}"
printf '%s\n' "${FROM_SOURCE[@]}" >>requirements/gym.lock
lock sglang 2_34 "${in_train[@]}"
printf '# requirements/sglang-cpu.txt, without the dependencies of these packages\n' >>requirements/sglang.lock
"${UV[@]}" --python-platform x86_64-manylinux_2_34 --no-deps --no-header requirements/sglang-cpu.txt >>requirements/sglang.lock
