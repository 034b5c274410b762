"""The Dockerfiles, as far as they can be checked without building them, and the script that builds them."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.distributed import HANG_S

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def hadolint(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    assert program is not None, "hadolint is not installed: pip install -e '.[dev]'"
    return subprocess.run([program, *arguments], input=text, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)


def test_hadolint_finds_nothing() -> None:
    done = hadolint(*map(str, DOCKERFILES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_find_something() -> None:
    done = hadolint("-", text='FROM debian\nRUN cd /tmp && echo $(echo "$a" \n')
    assert done.returncode != 0


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (name, arguments) of each instruction, with continued lines joined."""
    lines = re.sub(r"(?m)^#.*\n", "", path.read_text()).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_what_is_copied_is_there_and_reaches_the_build(path: Path) -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    copied = [rest.split()[:-1] for name, rest in instructions(path) if name == "COPY" and "--from" not in rest]
    sources = [source for sources in copied for source in sources]
    assert "." in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source == "." or source.split("/")[0] in kept, f"{source} is in .dockerignore"
    packaged = {
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "LICENSE",
        "README.md",
        "bapo_megatron",
        "patches",
        "configs",
    }
    assert packaged <= set(kept), "the installation reads them"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_the_image_runs_without_rights(path: Path) -> None:
    names = [name for name, _ in instructions(path)]
    users = [rest for name, rest in instructions(path) if name == "USER"]
    assert len(users) == 1
    assert int(users[0]) > 0
    assert names.index("USER") > max(i for i, (name, rest) in enumerate(instructions(path)) if "useradd" in rest)
    assert instructions(path)[-1][0] == "CMD"


def test_both_images_write_as_the_same_user() -> None:
    """The first image that fills a named volume sets its owner; docker/README.md names that user."""
    numbers = set()
    for path in DOCKERFILES:
        (added,) = re.findall(r"useradd .*--uid (\d+)", path.read_text())
        (used,) = [rest for name, rest in instructions(path) if name == "USER"]
        numbers |= {added, used}
    assert len(DOCKERFILES) == 2
    assert len(numbers) == 1
    readme = (ROOT / "docker" / "README.md").read_text()
    assert str(numbers.pop()) in readme


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_the_files_that_it_runs_and_reads_exist(path: Path) -> None:
    runs = " ".join(rest for name, rest in instructions(path) if name == "RUN")
    files = set(re.findall(r"(?:scripts|requirements)/[\w/-]+\.(?:sh|txt)", runs))
    files |= {f"scripts/{rest.removeprefix('SETUP=')}" for _, rest in instructions(path) if rest.startswith("SETUP=")}
    assert files
    for file in files:
        assert (ROOT / file).is_file(), file
        assert file.endswith(".txt") or os.access(ROOT / file, os.X_OK), f"{file} cannot be executed"


def test_compose() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for service in services.values():
        context = (ROOT / "docker" / service["build"]["context"]).resolve()
        assert (context, (context / service["build"]["dockerfile"]).is_file()) == (ROOT, True)
        assert "runs:/home/bapo/runs" in service["volumes"]
    assert services["gpu"]["shm_size"] == "16gb"
    assert services["gpu"]["ulimits"]["memlock"] == -1


TOOLS = ["bash", "cut", "dirname", "du", "id", "sed", "tail"]


def build_image(
    folder: Path, *arguments: str, builder: str | None = None, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run scripts/build_image.sh with no other programs than a stand-in for buildah; return also its calls."""
    for name in TOOLS:
        program = shutil.which(name)
        assert program is not None
        (folder / name).symlink_to(program)
    if builder is not None:
        (folder / "buildah").write_text(f'#!/bin/bash\necho "$*" >>"{folder}/calls"\n{builder}\n')
        (folder / "buildah").chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "build_image.sh", *arguments],
        env={"PATH": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


UNREACHABLE = '[[ "$*" != *"inspect"* && "$*" != *"pull"* ]] || { echo "no such host" >&2; exit 125; }'


@pytest.mark.parametrize(
    ("arguments", "builder", "variables", "error"),
    [
        ([], None, {}, "scripts/build_image.sh cpu, or scripts/build_image.sh gpu; got ''"),
        (["cpu"], None, {}, "neither docker, podman nor buildah works here; on Debian and Ubuntu: apt install buildah"),
        (["cpu"], "", {"BUILDER": "kaniko"}, "BUILDER must be docker, podman or buildah, got kaniko"),
        (
            ["cpu"],
            "",
            {"BUILDER": "podman"},
            "podman does not work here: see what `podman info` says, or set BUILDER to another",
        ),
        (
            ["cpu"],
            UNREACHABLE,
            {},
            "no base image: no such host; set BASE_IMAGE to an image that this machine has or can pull, "
            "or leave it out, and run this as root with debootstrap",
        ),
        (
            ["gpu"],
            UNREACHABLE,
            {},
            "no base image: no such host; set BASE_IMAGE to an image that this machine has or can pull",
        ),
    ],
)
def test_an_image_that_cannot_be_built_is_one_line_with_the_remedy(
    arguments: list[str], builder: str | None, variables: dict[str, str], error: str, tmp_path: Path
) -> None:
    done, _ = build_image(tmp_path, *arguments, builder=builder, **variables)
    assert (done.returncode, done.stderr) == (2, f"error: {error}\n")


def test_an_image_is_built_from_its_base_with_the_given_options_and_run(tmp_path: Path) -> None:
    done, calls = build_image(
        tmp_path, "cpu", "--volume", "/a:/a:ro", builder=f'[[ "$*" != *mount* ]] || echo {tmp_path}', DEMO="a=1 b=2"
    )
    assert done.returncode == 0, done.stderr
    base = "docker.io/library/python:3.11-slim-bookworm"
    assert calls[1] == (
        "--storage-driver vfs build --format docker --isolation chroot "
        f"--file {ROOT}/docker/Dockerfile.cpu --tag bapo-megatron:cpu --build-arg BASE_IMAGE={base} --volume /a:/a:ro "
        f"{ROOT}"
    )
    assert calls[-2].endswith("-- bapo demo a=1 b=2")
    assert calls[-1].startswith("--storage-driver vfs rm")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs debootstrap")
@pytest.mark.parametrize(("ends", "left"), [("kill -TERM $PPID", 1), ("exit 1", 1), ("exit 0", 0)])
def test_a_base_that_is_made_leaves_a_log_at_most(ends: str, left: int, tmp_path: Path) -> None:
    for name in ("cat", "mkdir", "mktemp", "rm", "tar"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / name).symlink_to(program)
    (tmp_path / "debootstrap").write_text(f'#!/bin/bash\nmkdir "${{@: -1}}/etc"\n{ends}\n')
    (tmp_path / "debootstrap").chmod(0o755)
    (scratch := tmp_path / "scratch").mkdir()
    build_image(tmp_path, "cpu", builder=UNREACHABLE, TMPDIR=str(scratch))
    assert len(found := [*scratch.iterdir()]) == left
    assert all(path.suffix == ".log" for path in found)
