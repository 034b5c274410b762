"""Packs for a GPU machine: what makes one unusable, how they are made, cut, joined and installed."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpu_packing
import prune_fatbin
import pytest
from gpu_packing import Content, PackError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed import HANG_S
from tests.packs import HERE, digests, wheel, write_pack
from tests.unit.fat_binaries import Container, cuda_library

ROOT = Path(__file__).parents[2]
PIP = gpu_packing.pip


@pytest.fixture(autouse=True)
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of packs."""
    monkeypatch.setattr(gpu_packing, "FOLDER", tmp_path / "packs")
    monkeypatch.setattr(gpu_packing, "OFFLINE", tmp_path / "offline")
    return tmp_path / "packs"


def carry(name: str, files: Mapping[str, bytes], **other: str) -> Path:
    return write_pack(gpu_packing.FOLDER / name, files, **other)


def test_a_pack_that_cannot_be_used_is_one_line(packs: Path) -> None:
    files = {"a-1-py3-none-any.whl": b"abc", "b-1-py3-none-any.whl": b"d" * 100}
    folder = carry("fla", files)
    assert gpu_packing.problem("fla") == ""
    again = f"; run `scripts/gpu_session.sh pack fla` on a machine with a network, and copy {folder} again"

    (folder / "a-1-py3-none-any.whl").unlink()
    assert gpu_packing.problem("fla") == f"pack fla is incomplete: a-1-py3-none-any.whl is missing{again}"
    (folder / "a-1-py3-none-any.whl").write_bytes(b"ab")
    assert gpu_packing.problem("fla") == f"pack fla is incomplete: a-1-py3-none-any.whl has 2 of 3 bytes{again}"
    (folder / "a-1-py3-none-any.whl").write_bytes(b"abd")
    damaged = "pack fla is damaged: a-1-py3-none-any.whl has another SHA-256 than pack.json says"
    assert gpu_packing.problem("fla") == damaged + again

    carry("fla", files, python="3.9")
    mine = f"Python {HERE['python']} and torch {HERE['torch']}"
    again = f"; make it with `--python {HERE['python']} --image LIST`, a list of this machine's packages"
    other = f"{folder} has pack fla for Python 3.9 and torch {HERE['torch']}, but this needs pack fla for {mine}"
    assert gpu_packing.problem("fla") == other + again
    carry("fla", files, torch="2.11.1")
    assert f"has pack fla for Python {HERE['python']} and torch 2.11.1, but" in gpu_packing.problem("fla")
    shutil.copytree(carry("nccl", files), packs / "fla", dirs_exist_ok=True)
    assert gpu_packing.problem("fla").startswith(
        f"{folder} has pack nccl for {mine}, but this needs pack fla for {mine}"
    )

    shutil.rmtree(folder)
    assert gpu_packing.problem("fla").startswith(f"pack fla is missing: no {folder}/pack.json; run ")
    assert gpu_packing.problem("flan").startswith("there is no pack 'flan'; packs are serve, kernels, te, ")


@pytest.mark.parametrize("seed", range(200))
def test_damage_anywhere_is_noticed(seed: int) -> None:
    """Each seed harms one byte, or the end, of one file, pack.json too."""
    draw = random.Random(seed)
    files = {f"{name}-1-py3-none-any.whl": draw.randbytes(draw.randint(1, 200)) for name in ("a", "b", "c")}
    folder = carry("kernels", files)
    assert gpu_packing.problem("kernels") == ""
    file = folder / draw.choice([*files, "pack.json"])
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content))
    if draw.random() < 0.5:
        del content[place:]
    else:
        content[place] ^= 1 << draw.randrange(8)
    before = json.loads((folder / "pack.json").read_text())
    file.write_bytes(content)
    why = gpu_packing.problem("kernels")
    try:
        is_same = json.loads((folder / "pack.json").read_text()) == before and file.name == "pack.json"
    except ValueError:
        is_same = False
    assert bool(why) != is_same, "only white space may differ"
    assert len(why.splitlines()) <= 1
    if why:
        assert "kernels" in why
        with pytest.raises(PackError, match=re.escape(why)):
            gpu_packing.install(["kernels"])
        assert not gpu_packing.OFFLINE.exists()


@pytest.mark.parametrize(
    "facts", ["", "[]", "null", "{}", '{"name": "fla", "python": 3, "torch": [], "files": [1]}', "\xff"]
)
def test_any_pack_json_is_read_or_refused(packs: Path, facts: str) -> None:
    (packs / "fla").mkdir(parents=True)
    (packs / "fla" / "pack.json").write_text(facts, encoding="latin-1")
    assert gpu_packing.problem("fla").startswith(f"pack fla is damaged: {packs}/fla/pack.json cannot be read (")


def installed() -> dict[str, str]:
    """Return the Python files that are installed."""
    root = gpu_packing.OFFLINE
    return {str(file.relative_to(root)): file.read_text() for file in sorted(root.rglob("*.py"))}


@pytest.mark.slow  # pip
def test_packs_share_folders_and_newer_ones_replace_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own --target would remove the first pack's part of a folder that the second has, too."""
    first = wheel(tmp_path, "first", "1", {"shared/a.py": b"A = 1", "old.py": b""})
    second = wheel(tmp_path, "second", "1", {"shared/b.py": b"B = 1"})
    carry("serve", {first.name: first.read_bytes()})
    carry("fla", {second.name: second.read_bytes()})
    stale = wheel(gpu_packing.FOLDER / "fla", "second", "0", {"shared/b.py": b"B = 0"})
    gpu_packing.install(["serve", "fla"])
    assert installed() == {"old.py": "", "shared/a.py": "A = 1", "shared/b.py": "B = 1"}, f"{stale} is not listed"

    monkeypatch.setattr(gpu_packing, "pip", lambda *_, **__: pytest.fail("everything is installed"))
    gpu_packing.install(["fla", "serve", "fla"])
    monkeypatch.setattr(gpu_packing, "pip", PIP)
    newer = wheel(tmp_path, "first", "2", {"shared/a.py": b"A = 2"})
    carry("serve", {newer.name: newer.read_bytes()})
    gpu_packing.install(["serve"])
    assert installed() == {"shared/a.py": "A = 2", "shared/b.py": "B = 1"}
    about = sorted(path.name for path in gpu_packing.OFFLINE.glob("*.dist-info"))
    assert about == ["first-2.dist-info", "second-1.dist-info"]


@pytest.mark.slow  # pip
def test_pieces_are_joined(tmp_path: Path) -> None:
    whole = wheel(tmp_path, "weights", "1", {"weights/__init__.py": b"TEXT = " + repr(os.urandom(500)).encode()})
    content = whole.read_bytes()
    for name, piece in zip(("smollm2-1", "smollm2-2"), gpu_packing.cut(whole, 2), strict=True):
        carry(name, {piece.name: piece.read_bytes()})
    folder = gpu_packing.FOLDER / "smollm2-2"
    folder.rename(tmp_path / "elsewhere")
    assert gpu_packing.problem("smollm2-1") == "", "its other piece may come with the next transfer"
    with pytest.raises(PackError, match="pack smollm2-2 is missing: no "):
        gpu_packing.install(["smollm2-1"])

    carry("smollm2-2", {f"{whole.name}.2-of-2": content[: -(-len(content) // 2)]})
    with pytest.raises(PackError, match=f"the pieces of {re.escape(whole.name)} are of different wheels"):
        gpu_packing.install(["smollm2-1"])
    assert not list(gpu_packing.OFFLINE.rglob("*.py"))

    shutil.rmtree(folder)
    (tmp_path / "elsewhere").rename(folder)
    gpu_packing.install(["smollm2-2"])
    with zipfile.ZipFile(whole) as file:
        assert installed() == {"weights/__init__.py": file.read("weights/__init__.py").decode()}


@given(content=st.binary(min_size=1, max_size=40), num_pieces=st.integers(1, 5))
def test_pieces_make_the_whole(tmp_path_factory: pytest.TempPathFactory, content: bytes, num_pieces: int) -> None:
    file = tmp_path_factory.mktemp("cut") / "x.whl"
    file.write_bytes(content)
    pieces = gpu_packing.cut(file, num_pieces)
    assert b"".join(piece.read_bytes() for piece in pieces) == content
    assert len(pieces) == num_pieces


def test_nccl_lies_where_ld_preload_names_it(tmp_path: Path, packs: Path) -> None:
    made = wheel(tmp_path, "nvidia_nccl_cu13", "2.30.7", {"nvidia/nccl/lib/libnccl.so.2": b"library"})
    folder = carry("nccl", {made.name: made.read_bytes()})
    for _ in range(2):  # a transfer replaces the folder
        gpu_packing.install(["nccl"])
        assert (packs / "nccl" / "libnccl.so.2").read_bytes() == b"library"
        assert gpu_packing.problem("nccl") == ""
        shutil.rmtree(folder)
        carry("nccl", {made.name: made.read_bytes()})
    assert not gpu_packing.OFFLINE.exists()


INDEX = {
    "alpha": ("beta>=1; python_version >= '3.12'", "gamma; extra == 'more'", "numpy", "Delta_Two"),
    "beta": ("torch", "nothing; python_version < '3.12'"),
    "delta-two": ("alpha",),
    "sglang": ("flashinfer",),
    "nvidia-nccl-cu13": (),
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer pip's downloads with small wheels; return what was asked for."""
    asked: list[str] = []

    def download(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        assert {"--no-deps", "3.12", "manylinux_2_28_x86_64"} <= set(arguments)
        for text in arguments[arguments.index("--no-deps") + 1 :]:
            asked.append(text)
            name = gpu_packing.name_of(text)
            wheel(folder, name.replace("-", "_"), "1", {f"{name}.py": os.urandom(1000)}, *INDEX[name])

    (tmp_path / "image.txt").write_text("torch==2.11.0\nnumpy  # any\nnvidia-nccl-cu13\n")
    monkeypatch.setattr(gpu_packing, "download", download)
    monkeypatch.setattr(gpu_packing, "checkout_bytes", lambda: 5000)
    return asked


def test_a_pack_has_what_its_packages_need_and_the_machine_lacks(
    tmp_path: Path, packs: Path, index: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_packing.pack(Content(("serve",), ("alpha==1", "sglang")), "3.12", tmp_path / "image.txt")
    assert index == ["alpha==1", "sglang==0.5.23", "beta>=1", "Delta_Two"]
    facts = json.loads((packs / "serve" / "pack.json").read_text())
    assert (facts["name"], facts["python"], facts["torch"]) == ("serve", "3.12", "2.11.0")
    files = {file: (packs / "serve" / file).read_bytes() for file in facts["files"]}
    assert [file.partition("-")[0] for file in files] == ["alpha", "beta", "delta_two", "sglang"]
    assert facts["files"] == digests(files)
    assert "MiB, 0.0 of 64 with the checkout: " in capsys.readouterr().out
    gpu_packing.pack(gpu_packing.PACKS["nccl"], "3.12", tmp_path / "image.txt")
    assert index[-1] == "nvidia-nccl-cu13==2.30.7", "although the machine has one"


def test_a_pack_that_is_too_large_is_not_left_there(
    tmp_path: Path, packs: Path, index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two pieces of beta fit, with the checkout, into what the whole does not fit into."""
    monkeypatch.setattr(gpu_packing, "TRANSFER_BYTES", 6250)
    image = tmp_path / "image.txt"
    with pytest.raises(
        PackError, match=r"^pack fla is too large: 0.0 MiB \(beta-1-py3-none-any.whl: 0.0\) and the checkout"
    ):
        gpu_packing.pack(Content(("fla",), ("beta",)), "3.12", image)
    assert not list(packs.iterdir())
    gpu_packing.pack(Content(("smollm2-1", "smollm2-2"), ("beta",)), "3.12", image)
    names = sorted(str(file.relative_to(packs)) for file in packs.rglob("*.whl*"))
    assert names == [f"smollm2-{i}/beta-1-py3-none-any.whl.{i}-of-2" for i in (1, 2)]
    image.write_text("numpy\n")
    with pytest.raises(PackError, match=r"image\.txt needs a line such as torch==2\.11\.0"):
        gpu_packing.pack(Content(("fla",), ("beta",)), "3.12", image)


def test_every_package_of_the_list_is_carried_or_there() -> None:
    image = {gpu_packing.name_of(line) for line in gpu_packing.listed_in(gpu_packing.IMAGE)}
    assert {"torch", "triton", "transformers", "einops"} <= image
    serve = {gpu_packing.name_of(text) for text in gpu_packing.PACKS["serve"].packages}
    needed = {gpu_packing.name_of(text) for text in gpu_packing.needs()}
    assert needed - serve - image == set()
    assert sorted(gpu_packing.PACKS) == ["fla", "kernels", "nccl", "serve", "smollm2-1", "smollm2-2", "te"]


def test_a_slim_wheel_is_a_wheel(tmp_path: Path) -> None:
    """Its RECORD has what is left, with digests, and its libraries have code for Hopper alone."""
    library = cuda_library([Container({80: b"a" * 50, 90: b"b" * 60})])
    kept, dropped = ("__init__.py", "sm90/ops.so"), ("flash_ops.abi3.so", "sm100/ops.so")
    members = {f"sgl_kernel/{name}": library if name.endswith(".so") else b"" for name in (*kept, *dropped)}
    full = wheel(tmp_path / "full", "sglang_kernel", "0.4.5", members)
    (tmp_path / "slim").mkdir()
    slim = gpu_packing.slim(full, tmp_path / "slim")
    with zipfile.ZipFile(slim) as file:
        content = {name: file.read(name) for name in file.namelist()}
    record = content.pop("sglang_kernel-0.4.5.dist-info/RECORD").decode().splitlines()
    assert [name for name in content if name.startswith("sgl_kernel/")] == [f"sgl_kernel/{name}" for name in kept]
    assert content["sgl_kernel/sm90/ops.so"] == library.replace(b"a" * 50, bytes(50))
    hashes = {name: urlsafe_b64encode(hashlib.sha256(x).digest()).decode().rstrip("=") for name, x in content.items()}
    lines = [f"{name},sha256={digest},{len(content[name])}" for name, digest in hashes.items()]
    assert record == [*lines, "sglang_kernel-0.4.5.dist-info/RECORD,,"]


ARCHITECTURES = (75, 80, 89, 90, 100, 103, 120)
IMAGES = st.dictionaries(st.sampled_from(ARCHITECTURES), st.binary(min_size=1, max_size=80), max_size=5)
CONTAINERS = st.lists(st.builds(Container, IMAGES, ptx=IMAGES, padding=st.sampled_from([0, 8, 24])), max_size=5)


def pruned(path: Path, library: bytes, cleared: Sequence[str] = ()) -> bytes:
    path.write_bytes(library)
    prune_fatbin.prune(path, 90, cleared)
    return path.read_bytes()


@settings(max_examples=100)
@given(containers=CONTAINERS, others=st.binary(min_size=1, max_size=50), clear=st.booleans())
def test_one_architecture_stays(
    tmp_path_factory: pytest.TempPathFactory, containers: list[Container], others: bytes, clear: bool
) -> None:
    """The result is the library that has zeros in place of other architectures' code, byte for byte."""
    path = tmp_path_factory.getbasetemp() / "library.so"
    sections = {".text": others, ".debug_info": others, "__nv_relfatbin": others}
    kept = [container.only(90) for container in containers]
    library = cuda_library(containers, sections)
    if not any(container.runs_on(90) for container in containers):
        with pytest.raises(ValueError, match=r"has code for .*, not for sm_90$"):
            pruned(path, library)
        assert path.read_bytes() == library
        return
    if clear:
        zeros = {name: bytes(len(others)) for name in (".debug_info", "__nv_relfatbin")}
        assert pruned(path, library, ("__nv_relfatbin", ".debug")) == cuda_library(kept, sections | zeros)
    else:
        assert pruned(path, library) == cuda_library(kept, sections)
    assert prune_fatbin.has_gpu_code(path)
    again = path.read_bytes()
    assert pruned(path, again) == again


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_library_is_refused_and_unchanged(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    library = cuda_library([Container({80: b"a" * 50, 90: b"b" * 60}, ptx={90: b"c" * 7})], {".debug_x": b"d" * 20})
    torn = library[: data.draw(st.integers(0, len(library) - 1))]
    path = tmp_path_factory.getbasetemp() / "torn.so"
    with pytest.raises(ValueError, match=re.escape(str(path))):
        pruned(path, torn)
    assert path.read_bytes() == torn
    harmed = bytearray(library)
    harmed[data.draw(st.integers(0, len(library) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(harmed)
    try:
        prune_fatbin.prune(path, 90)
    except ValueError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert str(path) in told
        assert path.read_bytes() == harmed
    assert path.stat().st_size == len(library)


def test_a_library_without_gpu_code_is_told_apart(tmp_path: Path) -> None:
    plain = tmp_path / "plain.so"
    plain.write_bytes(cuda_library(None, {".text": b"x"}))
    assert not prune_fatbin.has_gpu_code(plain)
    with pytest.raises(ValueError, match=r"has no section \.nv_fatbin"):
        prune_fatbin.prune(plain, 90)


def test_own_kernels_compile_for_three_architectures() -> None:
    """In a process without Triton's interpreter, which other tests may have chosen."""
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    code = "import check_packs, json; print(json.dumps([sorted(check_packs.own_kernels(a)) for a in (80, 90, 100)]))"
    variables = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["gradients_kernel", "statistics_kernel"]] * 3
