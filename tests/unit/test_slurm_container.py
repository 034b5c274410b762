"""What the container of a SLURM job sees of the machine's files."""

from pathlib import Path

import pytest

from bapo_megatron.config.load import load_config
from bapo_megatron.errors import UserError
from bapo_megatron.preflight.checks.slurm import check_slurm
from bapo_megatron.slurm.submit import container_arguments, mounts

READ = {
    "model.path": "model",
    "critic.path": "critic",
    "loss.reference_path": "reference",
    "teacher.path": "teacher",
    "teacher.path_by_source.a": "teacher-of-a",
    "lora.init_from": "adapters",
    "rollout.recorded_from": "rollouts",
    "data.path": "train/prompts.jsonl",
    "eval.path": "test/prompts.jsonl",
}


@pytest.fixture(autouse=True)
def _work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make <tmp_path>/work the working folder, and <tmp_path>/home the user's."""
    for name in ("work", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def mounted(folder: Path, *settings: str) -> list[str]:
    return [mount.replace(str(folder), "") for mount in mounts(load_config(["demo"], settings))]


@pytest.mark.parametrize("place", ["{folder}/store", "~", "../store"])
@pytest.mark.parametrize("setting", READ)
def test_what_the_job_reads_is_mounted_however_it_is_written(setting: str, place: str, tmp_path: Path) -> None:
    path = Path(place.format(folder=tmp_path)) / READ[setting]
    real = tmp_path / ("home" if place == "~" else "store") / READ[setting]
    folder = real.parent if real.suffix else real
    folder.mkdir(parents=True)
    if real.suffix:
        real.touch()
    assert mounted(tmp_path, f"{setting}={path}") == sorted([str(folder).replace(str(tmp_path), ""), "/work"])


def test_what_is_in_the_working_folder_is_mounted_with_it(tmp_path: Path) -> None:
    assert mounted(tmp_path, "model.path=demo", "data.path=prompts.jsonl") == ["/work"]


def test_where_links_lead_is_mounted_too(tmp_path: Path) -> None:
    """A model as in a Hugging Face cache, a file, and folders in the working folder that link to another disk."""
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "disk" / "runs", tmp_path / "disk" / "data"):
        folder.mkdir(parents=True)
    (blobs / "1f").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f")
    (tmp_path / "disk" / "data" / "prompts.jsonl").touch()
    (tmp_path / "work" / "prompts.jsonl").symlink_to(tmp_path / "disk" / "data" / "prompts.jsonl")
    (tmp_path / "work" / "runs").symlink_to(tmp_path / "disk" / "runs")
    settings = (f"model.path={snapshot}", "data.path=prompts.jsonl", "run.dir=runs")
    assert mounted(tmp_path, *settings) == ["/cache/blobs", "/cache/snapshots/abc", "/disk/data", "/disk/runs", "/work"]


def test_how_each_runtime_is_told(tmp_path: Path) -> None:
    extra = f'slurm.container_mounts=["{tmp_path}/more", "/a:/b:ro"]'
    pyxis = load_config(["demo"], ["slurm.runtime=pyxis", "slurm.container_image=i", extra])
    assert container_arguments(pyxis) == [
        f"--container-image={tmp_path}/work/i",
        f"--container-mounts={tmp_path}/more:{tmp_path}/more,{tmp_path}/work:{tmp_path}/work,/a:/b:ro",
        f"--container-workdir={tmp_path}/work",
    ]
    apptainer = load_config(["demo"], ["slurm.runtime=apptainer", "slurm.container_image=i", "cluster.gpu=h100"])
    assert container_arguments(apptainer) == [
        *("apptainer", "exec", "--nv", f"--bind={tmp_path}/work", f"--pwd={tmp_path}/work", "i"),
    ]
    assert container_arguments(load_config(["demo"])) == []


# image -> the address in the remedy, or None for one that the runtime takes as it is meant
PYXIS = {
    "docker://reg.example/bapo:1": "docker://reg.example#bapo:1",
    "docker://localhost:5000/bapo": "docker://localhost:5000#bapo",
    "docker://me@reg.example/team/bapo:1": "docker://me@reg.example#team/bapo:1",
    "docker://nvcr.io#nvidia/pytorch:26.01-py3": None,
    "docker://team/bapo:1": None,
    "docker://ubuntu:24.04": None,
    "docker://first.last@team/bapo": None,
    "nvcr.io#nvidia/pytorch:26.01-py3": None,
    "dockerd://bapo:1": None,
}
APPTAINER = {
    "docker://reg.example#bapo:1": "docker://reg.example/bapo:1",
    "docker://registry#bapo": "docker://registry/bapo",
    "docker://reg.example/bapo:1": None,
    "oras://reg.example/bapo:1": None,
}


@pytest.mark.parametrize(
    ("runtime", "image", "meant"),
    [("pyxis", *case) for case in PYXIS.items()] + [("apptainer", *case) for case in APPTAINER.items()],
)
def test_an_address_of_the_other_runtime_is_refused_with_the_right_one(
    runtime: str, image: str, meant: str | None
) -> None:
    settings = [f"slurm.runtime={runtime}", f"slurm.container_image={image}"]
    config = load_config(["demo"], settings)
    found = [v.remedy for v in check_slurm(config) if "slurm.container_image" in v.settings]
    assert found == ([] if meant is None else [f'set slurm.container_image="{meant}"'])
    if meant is None:
        assert image in " ".join(container_arguments(config))


@pytest.mark.parametrize("sign", [",", ":"])
def test_a_path_that_would_become_two_mounts_is_refused(sign: str, tmp_path: Path) -> None:
    config = load_config(
        ["demo"], ["slurm.runtime=apptainer", "slurm.container_image=i", f"run.dir={tmp_path}/a{sign}b"]
    )
    with pytest.raises(UserError, match="commas and colons separate mounts"):
        container_arguments(config)


def test_every_file_of_sources_and_evaluation_sets_is_mounted(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    sources = f'data.sources=[{{name="a",path="{tmp_path}/one/p.jsonl"}},{{name="b"}}]'
    sets = f'eval.sets=[{{name="a",path="{tmp_path}/two/p.jsonl"}}]'
    assert mounted(tmp_path, sources, sets) == ["/one", "/two", "/work"]
