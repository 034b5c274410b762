"""The model family that `model.family` names."""

from bapo_megatron.config.dotted import Seam
from bapo_megatron.hf.families import Family

FAMILY = Seam(
    "model.family",
    ("auto",),
    'a Family, such as FAMILY = Family("seed_oss", qkv_bias=True)',
)


def own_family(name: str) -> Family | None:
    """Return the user's own family at a dotted path, or None for "auto" (a family of the package).

    Raises:
        UserError: there is none at that path.
    """
    if name in FAMILY.names:
        return None
    family = FAMILY.load(name)
    if not isinstance(family, Family):
        raise FAMILY.error(name, f"it is of type {type(family).__name__}, not Family")
    return family
