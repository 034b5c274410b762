"""The base of every configuration section: frozen, and strict about unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
