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
_TRAITS = {*LossConfig.__class_vars__, "rule_reads"}
_FACTS = {
    "engine": ("rollout.engine",),
    "own": ("model.family",),
    "model": ("model.path", "model.family"),
    "teachers": ("teacher.path", "teacher.path_by_source"),
}


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
        return NotingRun(_noting(one.config, "", read.add), one.engine, one.own, one.model, one.teachers)

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

    class Noting(kind):  # type: ignore[valid-type, misc]
        model_config = ConfigDict(defer_build=True, use_attribute_docstrings=False)

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in kind.model_fields:
                if isinstance(value, Section):
                    values = super().__getattribute__("__dict__")
                    values[name] = _noting(value, f"{path}{name}.", note)  # kept, as making a class is slow
                    return values[name]
                note(path + name)
            elif issubclass(kind, LossConfig) and name in _TRAITS:
                note(f"{path}name")  # it chooses the class, which has these traits
            return value

    view = section.model_copy()
    object.__setattr__(view, "__class__", Noting)
    return view
