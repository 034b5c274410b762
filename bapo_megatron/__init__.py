"""BAPO on Megatron-Core: off-policy reinforcement learning of language models with adaptive clipping.

    import bapo_megatron

    config = bapo_megatron.load_config("demo", "train.num_steps=20")
    run = bapo_megatron.run(config)
    result = bapo_megatron.evaluate(run.path, samples=4, limit=16)

These three are the public interface; `bapo_megatron.api` documents them, and `__init__.pyi` tells type checkers.
"""

from typing import Any

from bapo_megatron.version import __version__

__all__ = ["Run", "__version__", "evaluate", "load_config", "run"]


def __getattr__(name: str) -> Any:
    """Import the interface on first use, so that `import bapo_megatron` stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("bapo_megatron.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
