"""The generated tables of docs/algorithms.md: what the registry and the job's schema say of algorithms.

`python -m docs.generate.algorithms` rewrites them, in the directory of the repository. Free of torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from docs.generate.markdown import rewrite, table
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Algorithm, Loss
from flowfleet.job.sequence import SequencePart
from flowfleet.job.spec import AlgorithmPart, EmaPart, JobSpec, NoisePart, PreviewPart, WindowPart

PAGE = Path("docs/algorithms.md")

_SHOWN = ("algorithm.loss", "rollout.noise.type", "rollout.noise.eta", "rollout.window.strategy", "rollout.window.size")
"""Settings with a column of their own."""
_SAMPLER_SETTINGS = (
    "rollout.num_inference_steps",
    "rollout.sampler",
    "rollout.tail_steps",
    "schedule.validation_steps",
    "schedule.validation_sampler",
)
_SAMPLES = {
    "policy": "the policy's noisy steps",
    "matching": "any sampler's",
    "distillation": "noisy steps of any sampler",
    "sequence": "the policy's tokens",
    "gradient": "any sampler's, and a reward's gradient",
}
"""What a kind of loss trains on. Those of any sampler need no correction."""
_SCHEMA: dict[str, type[BaseModel]] = {"rollout.noise": NoisePart, "rollout.window": WindowPart}


def parts() -> dict[str, str]:
    """Name to content of each generated part of the page."""
    names = ["`algorithm.name`", "source", "step", "window", "loss", "also fills in"]
    return {
        "algorithms": table(names, map(_algorithm_row, ALGORITHMS.values())),
        "losses": table(
            ["`algorithm.loss`", "kind", "samples", "reads of its own", "brings", "needs"],
            map(_loss_row, LOSSES.values()),
        ),
        "algorithm settings": _settings("algorithm", AlgorithmPart),
        "step settings": _settings("rollout.noise", NoisePart),
        "sequence settings": _settings("rollout.sequence", SequencePart),
        "preview settings": _settings("rollout.preview", PreviewPart),
        "window settings": _settings("rollout.window", WindowPart),
        "average settings": _settings("trainer.ema", EmaPart),
        "sampler settings": table(["setting", "default", "what"], map(_setting_row, _SAMPLER_SETTINGS)),
    }


def _algorithm_row(algorithm: Algorithm) -> list[str]:
    is_ode = _given(algorithm, "rollout.noise.eta") == 0
    step = f"`{_given(algorithm, 'rollout.noise.type')}`, eta {_given(algorithm, 'rollout.noise.eta')}"
    strategy = _given(algorithm, "rollout.window.strategy")
    window = "`all`" if strategy == "all" else f"`{strategy}`, {_given(algorithm, 'rollout.window.size')} steps"
    if algorithm.data == "preferences":
        step, window = "nothing is sampled", "–"
    elif LOSSES[algorithm.loss].kind == "sequence":
        step, window = "writes tokens", "–"
    elif LOSSES[algorithm.loss].from_steps:
        step = "the ODE (eta 0)"
        window = f"`{strategy}`, 1 step of the last quarter"
    elif is_ode:
        step, window = "the ODE (eta 0)", "–"
    loss = LOSSES[algorithm.loss]
    others = loss.settings | dict(algorithm.defaults)
    also = {name: value for name, value in others.items() if name not in _SHOWN}
    title = f"[{algorithm.title}]({algorithm.paper})" if algorithm.paper else algorithm.title
    return [f"`{algorithm.name}`", f"{title}. {algorithm.summary}", step, window, f"`{algorithm.loss}`", _listed(also)]


def _loss_row(loss: Loss) -> list[str]:
    needs = {
        "the old policy's means: no bypass": loss.needs_old_mean,
        "Gaussian log-probs: not `cps`": loss.needs_gaussian,
        "pairs": loss.needs_pairs,
        "whole groups in a micro-batch": loss.needs_groups,
        "the model before training": loss.needs_reference,
        "an old policy": loss.keeps_old_policy,
        "rewards with gradients; pictures; one update a step": loss.kind == "gradient",
    }
    reads = ", ".join(f"`{name}`" for name in loss.reads)
    return [
        f"`{loss.name}`",
        loss.kind,
        _SAMPLES[loss.kind],
        reads or "–",
        _listed(loss.defaults),
        ", ".join(text for text, is_needed in needs.items() if is_needed) or "–",
    ]


def _settings(prefix: str, part: type[BaseModel]) -> str:
    return table(["setting", "default", "what"], _setting_rows(prefix, part))


def _setting_rows(prefix: str, part: type[BaseModel]) -> Iterator[list[str]]:
    """A part inside the part gives a row of its own, then its settings."""
    for name, field in part.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield [f"`{prefix}.{name}`", "", type(field.default).__doc__ or ""]
            yield from _setting_rows(f"{prefix}.{name}", type(field.default))
        else:
            yield [f"`{prefix}.{name}`", _value(field.default), field.description or ""]


def _setting_row(name: str) -> list[str]:
    part, key = name.split(".")
    field = type(JobSpec.model_fields[part].default).model_fields[key]
    return [f"`{name}`", _value(field.default), field.description or ""]


def _given(algorithm: Algorithm, name: str) -> Any:
    """What a job gets that leaves the setting out."""
    part, _, key = name.rpartition(".")
    return algorithm.defaults.get(name, _SCHEMA[part].model_fields[key].default)


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name.removeprefix('algorithm.')}` {_value(value)}" for name, value in settings.items()) or "–"


def _value(value: Any) -> str:
    """Formats a value as in a job file."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, parts())
