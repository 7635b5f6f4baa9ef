"""The scorers by name. A package is imported only when its scorer is made, so that no service loads another's engine.

A folder holds one scorer, or a family that shares code: `scorer.toml` describes it (flowfleet/scorers.py), and the
package has `make(name, settings, num_threads)`.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Final

from flowfleet.scorers import known
from services.reward.scorer import AnyScorer, NoSettings

SCORERS: Final[Mapping[str, str]] = {name: folder.name for name, folder in known().items()}
"""Name to package of this one."""


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> AnyScorer:
    """The scorer called `name`, which may use `num_threads` CPU threads. ValueError for an unknown name and for
    settings that it cannot take, naming the setting."""
    if name not in SCORERS:
        raise ValueError(f"no scorer is called {name!r}: take one of {', '.join(SCORERS)}")
    if not known()[name].scorers[name].settings:
        NoSettings.read(settings)
    package = importlib.import_module(f"{__name__}.{SCORERS[name]}")
    scorer: AnyScorer = package.make(name, settings, num_threads)
    return scorer
