"""Which settings a computation reads, noted while it runs.

The computation gets a `Resolved` whose configuration notes each setting, also one that a property reads:

    reads(run, lambda run: run.config.parallel.size)
    == ("parallel.context", "parallel.data", "parallel.pipeline", "parallel.tensor")

Lists and tables of free names count as one setting, such as "eval.sets". Dumping a section, or comparing it, notes
nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ConfigDict

from bapo_megatron.config.base import Section
from bapo_megatron.config.schema_loss import LossConfig
from bapo_megatron.resolved import Resolved

AnySection = TypeVar("AnySection", bound=Section)
_FACTS = {"engine": ("rollout.engine",), "own": ("model.family",), "model": ("model.path", "model.family")}


def reads(run: Resolved, compute: Callable[[Resolved], object], *, first: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the settings that `compute` reads of this run, sorted, after those that `first` names."""
    read: set[str] = set()

    class NotingRun(Resolved):
        def __getattribute__(self, name: str) -> Any:
            read.update(_FACTS.get(name, ()))
            return super().__getattribute__(name)

        def changed(self, config: Any) -> Resolved:
            return noting(run.changed(config))

    def noting(one: Resolved) -> Resolved:
        return NotingRun(_noting(one.config, "", read.add), one.engine, one.own, one.model)

    compute(noting(run))
    return (*first, *sorted(read.difference(first)))


def _noting(section: AnySection, path: str, note: Callable[[str], object]) -> AnySection:
    """Return a copy that notes what is read of it, as do the copies that `model_copy` makes of it.

    Args:
        path: what names of its settings begin with, such as "parallel."; empty for the whole configuration.
    """
    kind = type(section)
    if kind.__name__ == "Noting":
        return section
    inner = {name: value for name, value in section if isinstance(value, Section)}
    settings = kind.model_fields.keys() - inner.keys()

    class Noting(kind):  # type: ignore[valid-type, misc]
        model_config = ConfigDict(defer_build=True, use_attribute_docstrings=False)

        def __getattribute__(self, name: str) -> Any:
            if name in settings:
                note(path + name)
            elif issubclass(kind, LossConfig) and not name.startswith(("_", "model_")):
                note(f"{path}name")  # it chooses the class, and so what else there is to read
            return super().__getattribute__(name)

    view = section.model_copy(update={name: _noting(value, f"{path}{name}.", note) for name, value in inner.items()})
    object.__setattr__(view, "__class__", Noting)
    return view
