"""Fields of a class become rows with their defaults, docstrings and, where they are few, values."""

from dataclasses import dataclass
from typing import Literal

import pytest
from pydantic import BaseModel

from docs.generate.fields import rows


class Base(BaseModel):
    path: str
    """Path of a file."""


class Settings(Base):
    device: Literal["cpu", "cuda"] = "cpu"
    """The device."""
    fit: Literal["pad", "crop"] = "pad"
    """pad: with a border. crop: the middle."""
    low: float | None = None
    high: float | None = None
    """Bounds."""
    scale: float = 26.0
    """Factor."""


@dataclass
class Plain:
    name: str
    """Name."""
    bounds: tuple[float, float] = (0.0, float("inf"))
    """Least and greatest."""


@dataclass
class Silent:
    name: str
    """Name."""
    size: int = 1


def test_a_model_s_own_fields() -> None:
    assert rows(Base) == [["`path`", "required", "Path of a file."]]
    assert rows(Settings) == [
        ["`device`", '`"cpu"`', "The device. One of `cpu`, `cuda`."],
        ["`fit`", '`"pad"`', "pad: with a border. crop: the middle."],
        ["`low`, `high`", "`null`", "Bounds."],
        ["`scale`", "`26`", "Factor."],
    ]


def test_a_dataclass() -> None:
    assert rows(Plain) == [["`name`", "required", "Name."], ["`bounds`", "`[0.0, ∞]`", "Least and greatest."]]


def test_a_field_without_a_docstring_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Silent\.size has no docstring"):
        rows(Silent)
