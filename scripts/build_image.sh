#!/usr/bin/env bash
# Build an image, print its size, and run it.
#
#   scripts/build_image.sh cpu [OPTION ...]    docker/Dockerfile.cpu, then `bapo demo` in the image
#   scripts/build_image.sh gpu [OPTION ...]    docker/Dockerfile.gpu, then `bapo doctor` in the image
#
# Options go to the builder, such as --build-arg BAPO_TORCH_INDEX=URL, or with podman and buildah --volume FILE:FILE:ro
# for what only the build may read: certificates, pip's configuration.
#
#   BUILDER     docker, podman or buildah (default: the first that works here)
#   BASE_IMAGE  base of the image (default: the Dockerfile's; if cpu's cannot be pulled and debootstrap is installed,
#               root gets the same Debian and Python made by debootstrap)
#   DEMO        settings of the demo, such as "train.num_steps=5"
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

kind="${1:-}"
[[ "$kind" == cpu || "$kind" == gpu ]] || fail "scripts/build_image.sh cpu, or scripts/build_image.sh gpu; got '$kind'"
shift
file="$ROOT/docker/Dockerfile.$kind"
image="bapo-megatron:$kind"
MADE="localhost/bapo-base:bookworm"

works() {
    case "$1" in
        buildah) command -v buildah >/dev/null ;;
        *) command -v "$1" >/dev/null && "$1" info >/dev/null 2>&1 ;;
    esac
}

# buildah needs neither a daemon nor kernel features: a plain copy of each layer, and chroot in place of a container.
with_builder() {
    case "$builder" in
        buildah) buildah --storage-driver vfs "$@" ;;
        *) "$builder" "$@" ;;
    esac
}

# Import an archive of a root folder as a base image; the archive keeps the owners of its files.
import_base() {
    if [[ "$builder" == buildah ]]; then
        local container
        container="$(with_builder from scratch)"
        with_builder add --quiet "$container" "$1" / >/dev/null
        with_builder commit --quiet --rm "$container" "$MADE" >/dev/null
    else
        with_builder import "$1" "$MADE" >/dev/null
    fi
}

# In a shell of its own, which removes what it made.
make_base() (
    folder="$(mktemp --directory)"
    # An interrupted debootstrap may have left file systems mounted there.
    trap 'rm -rf --one-file-system "$folder" "$folder.tar"' EXIT
    say "making $MADE with debootstrap"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$folder" >"$folder.log" ||
        fail "debootstrap failed; its log: $folder.log"
    rm -rf "$folder.log" "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
    tar --directory "$folder" --create --file "$folder.tar" .
    import_base "$folder.tar"
)

builder="${BUILDER:-}"
if [[ -n "$builder" ]]; then
    [[ "$builder" == docker || "$builder" == podman || "$builder" == buildah ]] ||
        fail "BUILDER must be docker, podman or buildah, got $builder"
    works "$builder" || fail "$builder does not work here: see what \`$builder info\` says, or set BUILDER to another"
else
    for builder in docker podman buildah none; do
        if works "$builder"; then break; fi
    done
    [[ "$builder" != none ]] ||
        fail "neither docker, podman nor buildah works here; on Debian and Ubuntu: apt install buildah"
fi

base="${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' "$file")}"
# Podman and buildah may have no registry for a short name.
[[ -n "${BASE_IMAGE:-}" ]] || case "$base" in */*) base="docker.io/$base" ;; *) base="docker.io/library/$base" ;; esac
if ! with_builder inspect --type image "$base" >/dev/null 2>&1 && ! said="$(with_builder pull --quiet "$base" 2>&1)"; then
    remedy="set BASE_IMAGE to an image that this machine has or can pull"
    if [[ "$kind" == cpu ]]; then remedy+=", or leave it out, and run this as root with debootstrap"; fi
    if [[ -n "${BASE_IMAGE:-}" || "$kind" == gpu || "$(id -u)" != 0 ]] || ! command -v debootstrap >/dev/null; then
        fail "no base image: $(tail -n 1 <<<"$said"); $remedy"
    fi
    with_builder inspect --type image "$MADE" >/dev/null 2>&1 || make_base
    base="$MADE"
fi

say "building $image with $builder from $base"
started=$SECONDS
options=()
# The format that podman and buildah write otherwise has no SHELL: they would ignore the Dockerfiles' pipefail.
[[ "$builder" == docker ]] || options=(--format docker)
[[ "$builder" != buildah ]] || options+=(--isolation chroot)
with_builder build ${options[@]+"${options[@]}"} --file "$file" --tag "$image" --build-arg "BASE_IMAGE=$base" "$@" "$ROOT"
say "built in $((SECONDS - started)) s"

command=(bapo doctor)
read -ra settings <<<"${DEMO:-}"
[[ "$kind" == gpu ]] || command=(bapo demo ${settings[@]+"${settings[@]}"})
if [[ "$builder" == buildah ]]; then
    container="$(with_builder from "$image")"
    trap 'with_builder rm "$container" >/dev/null' EXIT
    folder="$(with_builder mount "$container")"
    say "its size: $(du --summarize --block-size=MB "$folder" | cut -f 1)"
    run=(run --isolation chroot "$container" --)
else
    say "its size: $(with_builder image inspect --format '{{.Size}}' "$image") bytes"
    run=(run --rm --init "$image")
fi
say "${command[*]}, in the image"
with_builder "${run[@]}" "${command[@]}"
