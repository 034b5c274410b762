"""The wording of pydantic's findings about a value."""

import json
from typing import Any

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text in quotes",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}

_RELATIONS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}


def expected(error: dict[str, Any], *, is_table: bool = False) -> str:
    """Return the text that follows a value's name and says what it must be."""
    kind, context = error["type"], error.get("ctx", {})
    if is_table:
        return " is a table of settings"
    if kind in _EXPECTED:
        return f" must be {_EXPECTED[kind]}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", '"')
        return f" must be {choices}"
    if kind == "string_pattern_mismatch":
        return f" must match {context['pattern']}"
    if kind in _RELATIONS:
        (limit,) = context.values()
        return f" must be {_RELATIONS[kind]} {f'{limit:g}' if isinstance(limit, float) else limit}"
    return f": {error['msg']}"


def shown(value: Any) -> str:
    """Return a value as JSON, shortened if it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
