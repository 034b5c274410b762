"""Python environments that hold torch, a wheel of this checkout and the packages of a test, and nothing else."""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
PATIENCE_S = 7200.0  # for pip and a real training, under any load


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path
    log: str  # pip's output

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *command: str, cwd: Path, timeout_s: float = PATIENCE_S, **environment: str) -> str:
        """Run a command of the environment, which must succeed; return its output."""
        done = self.attempt(*command, cwd=cwd, timeout_s=timeout_s, **environment)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def attempt(
        self, *command: str, cwd: Path, timeout_s: float = PATIENCE_S, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(cwd), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)

    def distributions(self, cwd: Path) -> set[str]:
        code = "import importlib.metadata as m; print(*{d.name.lower().replace('_', '-') for d in m.distributions()})"
        return set(self.run(self.python, "-c", code, cwd=cwd).split())


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy, so that nothing is left in the checkout."""
    import shutil

    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("bapo_megatron", "patches", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    _call(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    (wheel,) = folder.glob("bapo_megatron-*.whl")
    return wheel


def make_environment(
    folder: Path, wheel: Path, *, linked: Iterable[str], packages: Iterable[str] = (), bare: Iterable[str] = ()
) -> Environment:
    """Make an environment around the installed torch.

    Args:
        linked: distributions of this environment to link in, with everything that they need: no download, no copy.
        packages: packages to install from the index with their dependencies, in one command with the wheel.
        bare: packages to install from the index first, without their dependencies.
    """
    _call(sys.executable, "-m", "venv", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python*/site-packages")
    found = _with_requirements(linked)
    for distribution in found.values():
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(distribution.locate_file(top))).resolve()
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    constraints = folder / "constraints.txt"  # linked packages must stay
    constraints.write_text("".join(f"{d.name}=={d.version}\n" for d in found.values()))
    pip = (*PIP, "--python", str(folder / "bin" / "python"), "install", "-c", str(constraints))
    log = _call(*pip, "--no-deps", *bare) if bare else ""
    return Environment(folder, log + _call(*pip, str(wheel), *packages))


def _with_requirements(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # a package of another platform
            continue
        texts = found[name].requires or []
        todo += [re.split(r"[^\w.-]", text)[0] for text in texts if "extra ==" not in text]
    return found


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
