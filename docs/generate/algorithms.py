"""The generated table of docs/algorithms.md: what the registry says of each algorithm.

`python -m docs.generate.algorithms` rewrites it, in the directory of the repository. Free of torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from docs.generate.markdown import rewrite, table
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Algorithm, Loss
from flowfleet.job.spec import NoisePart, WindowPart

PAGE = Path("docs/algorithms.md")

_SHOWN = (
    "algorithm.loss",
    "rollout.noise.type",
    "rollout.noise.eta",
    "rollout.window.strategy",
    "rollout.window.size",
    "trainer.updates_per_step",
)
"""Settings with a column of their own, and the one that the page explains below."""
_SCHEMA: dict[str, type[BaseModel]] = {"rollout.noise": NoisePart, "rollout.window": WindowPart}


def parts() -> dict[str, str]:
    """Name to content of the generated part of the page."""
    names = ["`algorithm.name`", "source", "step", "window", "loss", "also fills in"]
    return {"algorithms": table(names, map(_algorithm_row, ALGORITHMS.values()))}


def _algorithm_row(algorithm: Algorithm) -> list[str]:
    is_ode = _given(algorithm, "rollout.noise.eta") == 0
    step = f"`{_given(algorithm, 'rollout.noise.type')}`, eta {_given(algorithm, 'rollout.noise.eta')}"
    strategy = _given(algorithm, "rollout.window.strategy")
    window = "`all`" if strategy == "all" else f"`{strategy}`, {_given(algorithm, 'rollout.window.size')} steps"
    if algorithm.data == "preferences":
        step, window = "nothing is sampled", "–"
    elif LOSSES[algorithm.loss].traits.writes_tokens:
        step, window = "writes tokens", "–"
    elif LOSSES[algorithm.loss].from_steps:
        step = "ODE"
        window = f"`{strategy}`, 1 step of the last quarter"
    elif is_ode:
        step, window = "ODE", "–"
    loss = LOSSES[algorithm.loss]
    others = _own(loss) | loss.elsewhere | dict(algorithm.defaults)
    also = {name: value for name, value in others.items() if name not in _SHOWN}
    title = f"[{algorithm.title}]({algorithm.paper})" if algorithm.paper else algorithm.title
    return [f"`{algorithm.name}`", title, step, window, f"`{algorithm.loss}`", _listed(also)]


def _own(loss: Loss) -> dict[str, Any]:
    """Settings that other losses read too, to the defaults that this one declares."""
    shared = [name for name in loss.model.__annotations__ if sum(one.model.reads(name) for one in LOSSES.values()) > 1]
    defaults = {f"algorithm.{name}": loss.model.model_fields[name].default for name in shared}
    return {name: value for name, value in defaults.items() if not isinstance(value, BaseModel)}


def _given(algorithm: Algorithm, name: str) -> Any:
    """Returns the value that a job gets if it leaves the setting out."""
    part, _, key = name.rpartition(".")
    return algorithm.defaults.get(name, _SCHEMA[part].model_fields[key].default)


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name.removeprefix('algorithm.')}` {_value(value)}" for name, value in settings.items()) or "–"


def _value(value: Any) -> str:
    """Formats a value as in a job file."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


if __name__ == "__main__":
    rewrite(PAGE, parts())
