"""Base of the parts of a job, and values that several of them have."""

import difflib
import itertools
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from flowfleet.part import Part as Part

LEAST_FACTOR = 1e-6
NAMES = "give up to {} lowercase letters, digits and '-', a letter or digit first and last"
"""The rule of names that become names of hosts and pods."""


def _counts(factor: float) -> float:
    if 0 < abs(factor) < LEAST_FACTOR:
        raise ValueError(f"{factor:g} is too small to count: give 0, or at least {LEAST_FACTOR:g}")
    return factor


def _ascending(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    steps = [step for step, _ in points]
    if any(later <= earlier for earlier, later in itertools.pairwise([-1, *steps])):
        raise ValueError(f"steps {', '.join(map(str, steps))}: give points [step, factor] from step 0 on, ascending")
    return points


Factor = Annotated[float, Field(ge=-1e6, le=1e6), AfterValidator(_counts)]
"""A weight of a reward, or a factor of one."""
Share = Annotated[float, Field(ge=0.0, le=1e6), AfterValidator(_counts)]
"""A weight of a source of prompts, or a factor of one."""
Curve = Annotated[tuple[tuple[int, Factor], ...], AfterValidator(_ascending)]
"""Points [step, factor] of a weight: linear in between, constant before and after."""
ShareCurve = Annotated[tuple[tuple[int, Share], ...], AfterValidator(_ascending)]


def factor_at(curve: tuple[tuple[int, float], ...], step: int) -> float:
    """The factor of a curve at a step; 1 where there is no curve."""
    if not curve:
        return 1.0
    if step <= curve[0][0]:
        return curve[0][1]
    for (start, before), (end, after) in itertools.pairwise(curve):
        if step < end:
            return before + (after - before) * (step - start) / (end - start)
    return curve[-1][1]


def choice(name: str, known: Mapping[str, Any]) -> str:
    """`name`, which must be among the known ones: ValueError with them and the nearest."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        plugins = "a plugin can add others (docs/extending.md)"
        raise ValueError(f"{name!r} is not one of {', '.join(sorted(known))}{hint}; {plugins}")
    return name
