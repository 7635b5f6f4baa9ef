"""Fields of a class as rows of a table: name, default, and the docstring below each.

Pydantic models and dataclasses alike. Consecutive fields above one docstring share a row.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
import typing
from collections.abc import Iterable
from typing import Any, Final, Literal

from pydantic import BaseModel

REQUIRED: Final = "required"


def rows(owner: type) -> list[list[str]]:
    """Rows of the fields that a class declares itself, without those of its bases. ValueError for a field without a
    docstring."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    defaults, hints = _defaults(owner), typing.get_type_hints(owner)
    found: list[list[str]] = []
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in defaults:
            names.append(node.target.id)
        elif names and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            shown = ", ".join(dict.fromkeys(defaults[name] for name in names))
            found.append([_code(names), shown, _with_values(str(node.value.value), hints[names[0]])])
            names = []
    if names:
        raise ValueError(f"{owner.__name__}.{names[0]} has no docstring: say below the field what it is")
    return found


def _defaults(owner: type) -> dict[str, str]:
    if issubclass(owner, BaseModel):
        return {
            name: REQUIRED if field.is_required() else _default(field.get_default(call_default_factory=True))
            for name, field in owner.model_fields.items()
        }
    assert dataclasses.is_dataclass(owner)
    return {
        field.name: REQUIRED if field.default is dataclasses.MISSING else _default(field.default)
        for field in dataclasses.fields(owner)
    }


def _default(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return f"`{text.replace('Infinity', '∞')}`"


def _with_values(text: str, hint: Any) -> str:
    """A docstring, and the values that it leaves out where the field has only a few."""
    values = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return text if all(value in text for value in values) else f"{text} One of {_code(values)}."


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
