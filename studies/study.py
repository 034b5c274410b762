"""A study: the same small run with variants of its settings, over seeds. Each study is a TOML file in this folder.

title = "BAPO against GRPO"                 figure = "Figure 9"
question = "Does BAPO learn more?"          docs/reproduction.md answers it
seeds = [0, 1, 2, 3, 4]
settings = { train = { ... } }              tables of a configuration, merged over base.toml
compare = [["BAPO", "GRPO"]]                pairs of variants, compared seed by seed: what the study is to decide
explore = [["BAPO", "wide"]]                optional: further pairs, whose differences are only hints
[[variants]]
name = "GRPO"
settings = { loss = { name = "grpo" } }     merged over the study's settings
[[regimes]]                                 optional: circumstances in which to run and compare each variant;
name = "K = 4"                              the variants are then called "GRPO, K = 4" and so on
settings = { train = { ... } }              merged over the variant's settings
regret = true                               optional: add each variant's mean distance from the best over the regimes
[[plots]]
metric = "loss/entropy"                     a metric of metrics.jsonl, or of results.DERIVED
[quick]                                     what --quick changes
seeds = [0]
settings = { train = { num_steps = 2 } }
"""

from __future__ import annotations

import tomllib
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from bapo_megatron.config.base import Section
from bapo_megatron.config.load import load_tables, merge
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError, closest, did_you_mean
from studies.identity import run_name

_FOLDER = Path(__file__).parent
_BASE = _FOLDER / "base.toml"

HEADLINE = "pass rate"


class Variant(Section):
    """One curve of a figure or, as a regime, the settings that several curves share."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    cell: tuple[str, str] | None = None
    """The variant and the regime that it combines; `in_regimes` sets it."""


class Plot(Section):
    """A panel: a metric over optimizer updates with its spread over seeds, or "profile" (the token profile), or
    "comparisons" (the differences between the pairs in `compare` and `explore`)."""

    metric: str
    label: str | None = None
    """Label of the axis; the default is the metric's name."""
    log: bool = False
    """Whether the axis is logarithmic."""
    seeds: bool = False
    """Whether to draw a line for each seed, in place of their mean."""


class Quick(Section):
    """Changes for `--quick`, a short test that the study runs."""

    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    variants: tuple[str, ...] = ()
    """Unset: all."""
    settings: dict[str, Any] = Field(default_factory=dict)


class Study(Section):
    """The contents of a study's file."""

    title: str
    figure: str
    question: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    settings: dict[str, Any] = Field(default_factory=dict)
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    regimes: tuple[Variant, ...] = ()
    compare: tuple[tuple[str, str], ...] = ()
    """Pairs whose p-values are corrected for their number."""
    explore: tuple[tuple[str, str], ...] = ()
    regret: bool = False
    """Whether the page has the regret of each variant over the regimes (regret.py), and of the pairs in `compare`."""
    headline: str = HEADLINE
    """The final figure by which variants are compared, a column of results.FINALS."""
    plots: Annotated[tuple[Plot, ...], Field(min_length=1)]
    quick: Quick = Field(default_factory=Quick)
    needs: str | None = None
    """A folder that must exist, such as a model that does not ship with the package."""

    @model_validator(mode="after")
    def _names_are_known_and_seeds_differ(self) -> Study:
        names = [variant.name for variant in self.variants]
        for kind, of_kind in (("variants", names), ("regimes", [regime.name for regime in self.regimes])):
            if len(set(of_kind)) < len(of_kind):
                raise ValueError(f"two {kind} have the same name")
        for seeds in (self.seeds, self.quick.seeds):
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"the same seed twice in {list(seeds)}")
        if self.regret and not (self.regimes or any(variant.cell for variant in self.variants)):
            raise ValueError(
                "regret compares variants over regimes, and there are no regimes: add [[regimes]], or leave regret out"
            )
        for name in [*(name for pair in (*self.compare, *self.explore) for name in pair), *self.quick.variants]:
            if name not in names:
                raise ValueError(f"there is no variant {name!r}")
        return self

    def in_regimes(self) -> Study:
        """Return the study without regimes, with each variant in each regime as a separate variant."""
        if not self.regimes:
            return self

        def in_each(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
            return tuple((f"{a}, {r.name}", f"{b}, {r.name}") for r in self.regimes for a, b in pairs)

        return self.model_copy(
            update={
                "variants": tuple(
                    Variant(
                        name=f"{v.name}, {r.name}",
                        settings=merge(deepcopy(v.settings), r.settings),
                        cell=(v.name, r.name),
                    )
                    for r in self.regimes
                    for v in self.variants
                ),
                "compare": in_each(self.compare),
                "explore": in_each(self.explore),
                "quick": self.quick.model_copy(
                    update={"variants": tuple(f"{v}, {r.name}" for r in self.regimes for v in self.quick.variants)}
                ),
                "regimes": (),
            }
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of a study."""

    variant: str
    seed: int
    config: Config


def shipped_studies() -> dict[str, Path]:
    """Return the file of each shipped study by name, such as "staleness", in the order in which `all` runs them."""
    return {file.stem: file for file in sorted(_FOLDER.glob("*.toml")) if file != _BASE}


def load_study(name: str) -> Study:
    """Load a shipped study by its name, or any study from a TOML file, with its variants in their regimes.

    Raises:
        ConfigError: no such study exists, or its file is wrong; the message names the place and the reason.
    """
    shipped = shipped_studies()
    path = shipped.get(name, Path(name))
    if not path.is_file():
        every = f"give a TOML file, all, or one of: {', '.join(shipped)}"
        raise ConfigError(f"there is no study {name!r}; {did_you_mean(*closest(name, shipped)) or every}")
    try:
        return Study.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).in_regimes()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        where = ((".".join(map(str, details["loc"])), details["msg"]) for details in error.errors())
        raise ConfigError("\n".join(f"{path}: {place or 'study'}: {message}" for place, message in where)) from error


def plan_runs(study: Study, *, quick: bool, runs_dir: Path) -> list[Run]:
    """Return every run of a study, seed by seed. Runs with the same identity (identity.py) share a name across studies.

    Raises:
        ConfigError: a variant's settings are not a valid configuration.
    """
    variants = [v for v in study.variants if not (quick and study.quick.variants) or v.name in study.quick.variants]
    return [
        Run(variant.name, seed, _config(study, variant, seed, quick=quick, runs_dir=runs_dir))
        for seed in (study.quick.seeds if quick else study.seeds)
        for variant in variants
    ]


def _config(study: Study, variant: Variant, seed: int, *, quick: bool, runs_dir: Path) -> Config:
    tables = {
        "studies/base.toml": tomllib.loads(_BASE.read_text(encoding="utf-8")),
        "settings": study.settings,
        f"variant {variant.name!r}": variant.settings,
        "quick.settings": study.quick.settings if quick else {},
        "study": {"run": {"seed": seed, "dir": str(runs_dir)}},
    }
    config = load_tables(tables)
    return config.model_copy(update={"run": config.run.model_copy(update={"name": run_name(config)})})
