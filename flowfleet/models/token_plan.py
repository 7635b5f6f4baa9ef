"""How devices share the tokens of one sample in a transformer for which diffusers has no plan, or not a whole one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenPlan:
    modules: Mapping[str, Any]
    """Splits and gathers by module, as diffusers' `_cp_plan`."""
    whole_keys: tuple[str, ...] = ()
    """Attention layers whose keys each device has whole: it attends for its own queries alone."""
    gathered_keys: tuple[str, ...] = ()
    """Attention layers whose queries each device has whole, and of their keys a share: these are gathered."""
