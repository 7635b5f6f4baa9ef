"""Settings that nothing listens to: a problem only where the job changed them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec


def unheard(job: JobSpec, settings: tuple[str, ...], where: str) -> Iterator[str]:
    """Problems of those settings, which have no effect `where`, that the job changed."""
    for name in settings:
        if is_changed(job, name):
            yield f"{name} has no effect {where}"


def is_changed(job: JobSpec, name: str) -> bool:
    """Returns whether a dotted setting has a value that neither schema nor algorithm nor loss would have given it.

    By value: a job that is stored and read again names every setting, and must mean the same.
    """
    part, first, *rest = name.split(".")
    if part == "algorithm" and not job.algorithm.reads(first):
        return False
    value = reduce(getattr, (first, *rest), getattr(job, part))
    field: Any = type(getattr(job, part)).model_fields[first]
    given = [reduce(getattr, rest, field.default)]
    given += [defaults[name] for defaults in (job.method.defaults, job.loss.defaults) if name in defaults]
    return value not in given
