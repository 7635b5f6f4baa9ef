"""The base of every table of settings: strict, frozen, without unknown keys. Says in words what is wrong with one."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

_SCALARS = ("int", "float", "bool", "str")
_WANTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text"}
_RULES: dict[str, str] = {}
M = TypeVar("M", bound=BaseModel)


def _make_strict(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in _SCALARS:
            schema["strict"] = True
        for value in schema.values():
            _make_strict(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            _make_strict(value)


class Strict(BaseModel):
    """Takes no scalar of another type: no text or `true` as a number. Lists are tuples, as files and bodies have none,
    and whole numbers are floats."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        schema = handler(source)
        _make_strict(schema)
        return schema


class Part(Strict):
    """A table of settings. A docstring below a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def parsed(kind: type[M], data: Any) -> M:
    """Validates data of a caller. Raises ValueError, a line a problem, each beginning with its setting."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, item['loc'])) or 'body'}: {in_words(item)}" for item in error.errors())
        raise ValueError("\n".join(lines)) from None


def rule(pattern: str, words: str) -> str:
    """Returns the regular expression of a setting's text. Messages state it as `words`, which begin with a verb."""
    _RULES[pattern] = words
    return pattern


def in_words(item: Any) -> str:
    """Says what is wrong with a setting and what to give, by an error of pydantic's."""
    kind, given = str(item["type"]), item.get("input")
    if kind == "string_pattern_mismatch" and (words := _RULES.get(item["ctx"]["pattern"])):
        return f"{_shown(given)}: {words}"
    wanted = _WANTED.get(re.split("_(?:type|parsing|from_float)", kind)[0]) if "_" in kind else None
    if wanted is None or isinstance(given, dict | list):
        return str(item["msg"]).removeprefix("Value error, ")
    told = f"{_shown(given)} is not {wanted}"
    return told + (": write it without quotes; YAML needs a dot and a sign, as in 1.0e-3" if _is_number(given) else "")


def _shown(given: Any) -> str:
    if isinstance(given, bool) or given is None:
        return {True: "true", False: "false", None: "null"}[given]
    return repr(given if not isinstance(given, str) else given[:100])


def _is_number(given: Any) -> bool:
    return isinstance(given, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", given) is not None
