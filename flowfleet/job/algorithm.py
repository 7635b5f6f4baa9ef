"""`[algorithm]` of a job: the model of its loss reads it, over what algorithm and loss fill in.

The registry chooses the model, so a plugin's loss is validated, described and stored as Flowfleet's own are.
"""

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from flowfleet import plugins
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Algorithm, Loss
from flowfleet.algorithms.settings import LossSettings
from flowfleet.job.part import choice

DEFAULT = "flow_grpo"
"""Name of the algorithm and of the loss of a job that names none."""


class AlgorithmTable:
    """Annotation of a field that holds the settings of any registered loss."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_read, handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        plugins.load()
        return {"anyOf": [_described(loss, handler) for _, loss in sorted(LOSSES.items())]}


class _Names(LossSettings):
    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str) -> str:
        return choice(name, ALGORITHMS)

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return choice(name, LOSSES)


def _read(data: Any) -> Any:
    """The settings of the named loss. Errors keep the names of the settings that they are about."""
    if not isinstance(data, dict):
        return data
    for key, known in (("name", ALGORITHMS), ("loss", LOSSES)):
        if isinstance(name := data.get(key, DEFAULT), str) and name not in known:
            return _Names.model_validate({key: name})
    loss = LOSSES.get(str(data.get("loss", DEFAULT)))
    return (LossSettings if loss is None else loss.model).model_validate(data)


def _described(loss: Loss, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    """The schema of a table that names this loss or one of its algorithms."""
    model = handler.resolve_ref_schema(handler(loss.model.__pydantic_core_schema__))
    own = sorted(algorithm.name for algorithm in ALGORITHMS.values() if algorithm.loss == loss.name)
    named: JsonSchemaValue = {"properties": {"name": {"enum": own}}}
    if DEFAULT not in own:
        named["required"] = ["name"]
    model["properties"]["loss"] = {**model["properties"]["loss"], "const": loss.name, "default": loss.name}
    return {**model, "anyOf": [named, {"required": ["loss"]}]}


def filled(data: dict[str, Any]) -> dict[str, Any]:
    """The job's own settings over its algorithm's over its loss's; but a loss that the job itself chose goes before the
    algorithm, which was written for another. The schema refuses later what is malformed."""
    part = data.get("algorithm", {})
    if not isinstance(part, dict):
        return data
    algorithm = ALGORITHMS.get(str(part.get("name", DEFAULT)))
    loss = None if algorithm is None else LOSSES.get(str(part.get("loss", algorithm.loss)))
    filled = data
    for name, value in {} if algorithm is None else defaults_of(algorithm, loss).items():
        filled = _with_default(filled, name.split("."), value)
    return filled


def loss_of(data: dict[str, Any]) -> Loss:
    """The loss that a job's table means, or the default one where it means none."""
    part = filled(data).get("algorithm")
    name = part.get("loss") if isinstance(part, dict) else getattr(part, "loss", DEFAULT)
    return LOSSES.get(str(name), LOSSES[DEFAULT])


def defaults_of(algorithm: Algorithm, loss: Loss | None) -> dict[str, Any]:
    """Dotted settings to what an algorithm with this loss fills in besides the defaults of the loss's own model."""
    by_algorithm = {"algorithm.loss": algorithm.loss, **algorithm.defaults}
    if loss is None:
        return by_algorithm
    is_own = loss.name == algorithm.loss
    by_loss = loss.elsewhere
    values = by_loss | by_algorithm if is_own else by_algorithm | by_loss
    return {name: value for name, value in values.items() if _listens(loss, name, is_own=is_own)}


def _listens(loss: Loss, name: str, *, is_own: bool) -> bool:
    """Returns whether an algorithm's default reaches the loss: defaults of a loss of another algorithm go first."""
    part, _, key = name.partition(".")
    if part != "algorithm":
        return True
    key = key.partition(".")[0]
    return loss.model.reads(key) and (is_own or key not in loss.model.__annotations__)


def _with_default(data: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A copy of `data` that holds `value` at a path, unless there is something already."""
    key, *rest = path
    if not rest:
        return {key: value} | data
    inner = data.get(key, {})
    return data | {key: _with_default(inner, rest, value)} if isinstance(inner, dict) else data
