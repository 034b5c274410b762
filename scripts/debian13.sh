#!/usr/bin/env bash
# Run a command of this checkout in a file system of Debian 13: its Python 3.13 gets the newest Megatron-Core.
#
#   scripts/debian13.sh scripts/quickstart.sh
#   scripts/debian13.sh scripts/test.sh --learner
#
# Needs root, unshare and debootstrap (apt install debootstrap). The first call makes the file system; the command's own
# installation fills an environment in it, and later calls use both again.
#
#   BAPO_DEBIAN13   its folder (default: /var/cache/bapo-megatron/debian13); to start over, delete it
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case "${1:-}" in
    -h | --help)
        sed -n '2,/^set/{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
        exit
        ;;
    "") fail "no command was given; for example: $0 scripts/quickstart.sh" ;;
esac
((EUID == 0)) || fail "only root can make and enter a file system; run it as root, or in a container of Debian 13"
for program in debootstrap unshare chroot; do
    command -v "$program" >/dev/null || fail "$program was not found (apt install debootstrap util-linux coreutils)"
done

SYSTEM="${BAPO_DEBIAN13:-/var/cache/bapo-megatron/debian13}"
PACKAGES=ca-certificates,python3,python3-venv,python3-dev,gcc,libc6-dev,libnuma1,procps,git

if [[ ! -e "$SYSTEM/complete" ]]; then
    say "making a file system of Debian 13 in $SYSTEM"
    mkdir -p "$SYSTEM"
    debootstrap --variant=minbase --include="$PACKAGES" trixie "$SYSTEM" >"$SYSTEM.log" ||
        fail "debootstrap failed; its log is $SYSTEM.log"
    touch "$SYSTEM/complete"
fi
cp /etc/resolv.conf "$SYSTEM/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$SYSTEM/etc/ssl/certs/ca-certificates.crt"  # may have a company's own
mkdir -p "$SYSTEM$ROOT"

# The mounts are in a namespace of their own and end with the command.
export SYSTEM ROOT
# shellcheck disable=SC2016  # the inner shell expands these
exec unshare --mount --pid --fork --kill-child bash -euo pipefail -c '
    mount --types proc proc "$SYSTEM/proc"
    mount --rbind /dev "$SYSTEM/dev"
    mount --rbind /sys "$SYSTEM/sys"
    mount --bind "$ROOT" "$SYSTEM$ROOT"
    exec chroot "$SYSTEM" env --unset=VIRTUAL_ENV --unset=PYTHONPATH VENV=/venv HOME=/root LC_ALL=C.UTF-8 \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        bash -c "cd \"\$1\" && shift && exec \"\$@\"" in-debian13 "$ROOT" "$@"
' debian13 "$@"
