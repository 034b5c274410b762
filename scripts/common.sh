# shellcheck shell=bash
# Setup that the other scripts share; source it, do not run it.
#
#   VENV             environment to use or create (default: the active one, or .venv in the checkout)
#   PYTHON           interpreter that creates it (default: python3)
#   BAPO_STACK       cpu or gpu: versions from requirements/cpu.txt or gpu.txt (default: gpu if nvidia-smi lists a GPU)
#   BAPO_TORCH_SPEC  torch to install if there is none (default: the version in that file)
#   BAPO_TORCH_INDEX package index for torch alone, such as PyTorch's own index of CPU builds

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
LOCKED_PYTHON=3.11  # the Python for which requirements/*.lock were written

say() { printf '==> %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

[[ "${BAPO_STACK:-cpu}" == cpu || "${BAPO_STACK:-}" == gpu ]] || fail "BAPO_STACK must be cpu or gpu, got $BAPO_STACK"

# Find or create the environment, and set PY to its interpreter.
use_environment() {
    local venv="${VENV:-${VIRTUAL_ENV:-$ROOT/.venv}}"
    if [[ ! -x "$venv/bin/python" ]]; then
        local python="${PYTHON:-python3}"
        command -v "$python" >/dev/null || fail "$python was not found; install Python 3.11 or newer, or set PYTHON"
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "$("$python" --version) is too old; Python 3.11 or newer is needed (set PYTHON)"
        say "making a virtual environment in $venv"
        "$python" -m venv "$venv" || fail "could not make $venv (on Debian and Ubuntu: apt install python3-venv)"
    fi
    PY="$venv/bin/python"
    "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "the environment $venv has $("$PY" --version); Python 3.11 or newer is needed (set VENV)"
    export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
}

# Use the checkout in place, on a machine without a network: nothing is installed into the environment. PYTHONPATH gets
# links to the folders whose import names differ once installed (setup.py), the package's metadata, and those of the named
# packs (gpu_packing.py) that are in BAPO_PACKS (default: .packs/ in the checkout). Sets PY.
use_offline() {
    local venv="${VENV:-${VIRTUAL_ENV:-}}" folder pack packs=()
    export OFFLINE="${OFFLINE:-$ROOT/.bapo-offline}" BAPO_PACKS="${BAPO_PACKS:-$ROOT/.packs}"
    PY="${venv:+$venv/bin/python}"
    PY="${PY:-$(command -v "${PYTHON:-python3}" || true)}"
    [[ -x "$PY" ]] || fail "no Python was found; set VENV or PYTHON"
    "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$PY" --version) is too old; Python 3.11 or newer is needed (set PYTHON)"
    mkdir -p "$OFFLINE"
    for folder in patches configs; do
        ln -sfn "$ROOT/$folder" "$OFFLINE/bapo_megatron_$folder"
    done
    export PYTHONPATH="$OFFLINE:$ROOT${PYTHONPATH:+:$PYTHONPATH}" PATH="$OFFLINE/bin:$PATH"
    export PIP_NO_INDEX=1 HF_HUB_OFFLINE=1
    for pack in "$@"; do
        [[ ! -e "$BAPO_PACKS/$pack" ]] || packs+=("$pack")
    done
    if ((${#packs[@]})); then
        "$PY" "$ROOT/scripts/gpu_packing.py" install "${packs[@]}"
    fi
    [[ -d "$OFFLINE/bapo_megatron.egg-info" ]] ||
        (cd "$ROOT" && "$PY" setup.py --quiet egg_info --egg-base "$OFFLINE") 2>/dev/null ||
        say "no setuptools here: bapo doctor cannot tell which packages are missing"
}

# Print the file of tested versions for this machine. On a GPU machine it has the torch that SGLang pins: another one
# would be replaced when SGLang is installed, under everything that was compiled against it.
pins() {
    local stack="${BAPO_STACK:-}"
    if [[ -z "$stack" ]]; then
        stack=cpu
        if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU '; then
            stack=gpu
        fi
    fi
    printf '%s\n' "$ROOT/requirements/$stack.txt"
}

# Succeed if pip can compile a package, which reasoning-gym needs.
can_compile() {
    command -v cc >/dev/null &&
        "$PY" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

# Install torch unless there is one: an installed CPU or CUDA build is kept.
install_torch() {
    if "$PY" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
        return
    fi
    local spec="${BAPO_TORCH_SPEC:-$(grep '^torch==' "$(pins)")}" index=()
    if [[ -n "${BAPO_TORCH_INDEX:-}" ]]; then
        index=(--index-url "$BAPO_TORCH_INDEX")
    fi
    say "installing $spec"
    "$PY" -m pip install --disable-pip-version-check ${index[@]+"${index[@]}"} "$spec"
}

# Write the tested versions to a file, but with the installed torch instead of the tested one, so that pip keeps it.
constraints() {
    local file="$VIRTUAL_ENV/.bapo-constraints.txt" torch
    torch="$("$PY" -c 'from importlib.metadata import version; print(version("torch"))')"
    sed "s/^torch==.*/torch==$torch/" "$(pins)" >"$file"
    printf '%s\n' "$file"
}

# Set LOCKS to the lock files of some extras; fail if they do not apply here: they are for one version of Python, one
# processor, and packages that fit the tested torch.
use_locks() {
    local extra tested
    tested="$(sed -n 's/^torch==//p' "$ROOT/requirements/cpu.txt")"
    "$PY" - "$LOCKED_PYTHON" "$tested" <<'EOF' || return
import platform, sys
from importlib.metadata import version

here = (platform.python_version().rpartition(".")[0], version("torch").partition("+")[0], platform.machine())
sys.exit(here != (*sys.argv[1:], "x86_64"))
EOF
    LOCKS=("$ROOT/requirements/train.lock")
    for extra in ${1//,/ }; do
        [[ -e "$ROOT/requirements/$extra.lock" ]] || return
        [[ "$extra" == train ]] || LOCKS+=("$ROOT/requirements/$extra.lock")
    done
}

# Install the checkout with the given extras, such as "train", unless this was done since setup.py last changed. If the
# locks apply, they determine every package, checked by its digest; otherwise the tested versions apply, to the packages
# that setup.py names.
install_checkout() {
    local extra="$1" stamp key lock
    stamp="$VIRTUAL_ENV/.bapo-installed-$extra"
    key="$(cd "$ROOT" && cat setup.py pyproject.toml scripts/common.sh requirements/*.{txt,lock} | cksum) $ROOT"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]]; then
        say "packages are installed in $VIRTUAL_ENV"
        return
    fi
    install_torch
    if use_locks "$extra"; then
        say "installing bapo-megatron[$extra] and what it needs, from requirements/*.lock"
        for lock in "${LOCKS[@]}"; do  # the first includes setuptools, which builds the packages after it
            "$PY" -m pip install --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
                --no-build-isolation -r "$lock"
        done
        "$PY" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e "$ROOT"
    else
        say "installing bapo-megatron[$extra] and what it needs"
        "$PY" -m pip install --disable-pip-version-check -c "$(constraints)" -e "${ROOT}[$extra]"
    fi
    printf '%s\n' "$key" >"$stamp"
}

# Install SGLang for a machine without a GPU, unless this was done before. torch is kept: SGLang and the packages whose
# own pins would replace torch are installed without dependencies, after what SGLang needs to serve text models.
install_sglang_cpu() {
    local stamp key torch_before
    install_checkout "${1:-train,sglang}"
    stamp="$VIRTUAL_ENV/.bapo-installed-sglang-packages"
    key="$(cat "$ROOT"/requirements/*.{txt,lock} | cksum)"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]]; then
        say "SGLang is installed in $VIRTUAL_ENV"
        return
    fi
    torch_before="$("$PY" -m pip show torch | grep '^Version')"
    say "installing SGLang without its GPU packages"
    "$PY" -m pip install --disable-pip-version-check --no-deps -c "$(constraints)" -r "$ROOT/requirements/sglang-cpu.txt"
    [[ "$("$PY" -m pip show torch | grep '^Version')" == "$torch_before" ]] || fail "installing SGLang changed torch"
    "$PY" -c 'from bapo_megatron_patches.sglang import apply_cpu_compat; apply_cpu_compat()
import sglang.srt.entrypoints.http_server' || fail "SGLang was installed but cannot be imported"
    printf '%s\n' "$key" >"$stamp"
}
