"""Plugins: installed packages that add models, losses and algorithms. Free of torch.

A package names a module under the entry point group `flowfleet.plugins`; `load` imports it once and its `register`
calls do the rest. Only what an operator installed is ever imported: a job file can choose a name, never a module.
"""

from functools import cache
from importlib.metadata import entry_points

GROUP = "flowfleet.plugins"


@cache
def load() -> tuple[str, ...]:
    """Imports every plugin and returns their names. A plugin's errors pass through: a broken one must not go unseen."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    for point in points:
        point.load()
    return tuple(point.name for point in points)
