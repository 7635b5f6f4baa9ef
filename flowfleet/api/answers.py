"""Base of the REST API's answers. The controller forbids unknown fields; the client ignores them (`read`)."""

import math
from enum import StrEnum
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict


class OpenEnum(StrEnum):
    """A StrEnum that keeps values of other releases: they are members without a name, and in no list of members."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member

    @property
    def known(self) -> bool:
        """This release has the value."""
        return self.value in type(self)._value2member_map_


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite)]
"""JSON has no NaN and no infinity: they are shown as null."""


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


A = TypeVar("A", bound=Answer)


def read(kind: type[A], data: Any) -> A:
    """An answer of a controller that may be newer, as JSON text or as what was read from it."""
    if isinstance(data, str | bytes):
        return kind.model_validate_json(data, extra="ignore")
    return kind.model_validate(data, extra="ignore")
