"""Reference of a job's settings: name, values, default and description of each, as the schema has them.

`flowfleet settings`, docs/settings.md and the hints at unknown settings read it. Free of torch.
"""

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Loss
from flowfleet.algorithms.settings import LossSettings

PEERS: dict[str, str] = tomllib.loads(Path(__file__).with_name("peers.toml").read_text(encoding="utf-8"))
"""Words of other tools → our setting."""


@dataclass(frozen=True)
class Setting:
    """A setting of a job. `name` has dots, `NAME` where the table is keyed by a user's name, `N` in a list; `default`
    is as in JSON, or "required"."""

    name: str
    values: str
    default: str
    description: str
    losses: tuple[str, ...] = ()
    """Losses that read it; empty for a setting that no loss changes."""

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


def settings(schema: type[BaseModel], prefix: str = "", loss: Loss | None = None) -> Iterator[Setting]:
    """Lists the settings below a part of a job, in the order of the schema: of `[algorithm]` those that the loss reads,
    or those of every loss, each once."""
    for name, field in schema.model_fields.items():
        inner, key = _table(field.annotation)
        if inner is None:
            description = " ".join((field.description or "").split())
            is_given = not field.is_required()
            default = _text(field.get_default(call_default_factory=True)) if is_given else "required"
            yield Setting(f"{prefix}{name}", _values(field), default, description)
        elif inner is LossSettings:
            yield from of_loss(loss) if loss else of_losses()
        else:
            yield from settings(inner, f"{prefix}{name}.{key}")


def of_loss(loss: Loss, defaults: Mapping[str, Any] | None = None) -> Iterator[Setting]:
    """The settings of `[algorithm]` that a loss reads, with an algorithm's `defaults` over the loss's own."""
    for one in settings(loss.model, "algorithm."):
        given = (defaults or {}).get(one.name)
        default = one.default if given is None else _text(given)
        yield replace(one, default=json.dumps(loss.name) if one.name == "algorithm.loss" else default)


def of_losses() -> Iterator[Setting]:
    """The settings of `[algorithm]` of all losses."""
    found: dict[str, dict[str, Setting]] = {}
    for loss in sorted(LOSSES.values(), key=lambda one: one.name != "flow_grpo"):
        for one in settings(loss.model, "algorithm."):
            found.setdefault(one.name, {})[loss.name] = one
    for readers in found.values():
        names: dict[str, list[str]] = {}
        for loss_name, one in readers.items():
            names.setdefault(one.default, []).append(loss_name)
        default, *others = sorted(names, key=lambda text: -len(names[text]))
        rest = ", ".join(f"{' and '.join(names[other])} {other}" for other in others)
        first = next(one for one in readers.values() if one.default == default)
        names_of = () if len(readers) == len(LOSSES) else tuple(sorted(readers))
        yield replace(first, default=f"{default} ({rest})" if rest else default, losses=names_of)


def readers(name: str, *, writes_tokens: bool) -> list[str]:
    """Losses that read a dotted setting, those for a job's kind of policy if there are any."""
    found = [loss for loss in LOSSES.values() if any(f"{one.name}.".startswith(f"{name}.") for one in of_loss(loss))]
    suited = [loss for loss in found if loss.traits.writes_tokens == writes_tokens]
    return sorted(loss.name for loss in suited or found)


def find(name: str, known: Sequence[Setting]) -> list[Setting]:
    """The settings that a user means: one by its name, a whole table, those that a loss or an algorithm reads, all
    with this last part, or other tools' word."""
    plain = name.strip().strip(".")
    if algorithm := ALGORITHMS.get(plain):
        return list(of_loss(LOSSES[algorithm.loss], {"algorithm.name": plain, **algorithm.defaults}))
    if loss := LOSSES.get(plain):
        return list(of_loss(loss))
    exact = [one for one in known if one.name == plain]
    below = [one for one in known if one.name.startswith(f"{plain}.")]
    leaves = [one for one in known if one.leaf == plain.rpartition(".")[2]]
    peers = [one for one in known if one.name == PEERS.get(plain.rpartition(".")[2].lower())]
    return exact or below or leaves or peers


def near(name: str, known: Sequence[Setting]) -> list[str]:
    """Up to three names that an unknown one may stand for, the likeliest first."""
    given = name.split(".")
    for table, stand_in in ((["rewards"], "NAME"), (["data", "sources"], "N")):
        place = len(table)
        if given[:place] == table and len(given) > place + 1:
            given[place], own = stand_in, given[place]
            return [one.replace(f".{stand_in}.", f".{own}.", 1) for one in _near(".".join(given), known)]
    return _near(name, known)


def _near(name: str, known: Sequence[Setting]) -> list[str]:
    parent, _, leaf = name.rpartition(".")
    inside = f"{parent}." if parent else ""
    below = [one.name for one in known if one.name.startswith(inside)]
    siblings = list(dict.fromkeys(one.removeprefix(inside).partition(".")[0] for one in below))
    leaves = list(dict.fromkeys(one.leaf for one in known))
    found = (
        [inside + one for one in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.75)]
        or [one for one in below if one.rpartition(".")[2] == leaf]
        or [PEERS[word] for word in [leaf.lower()] if word in PEERS]
        or _by_words(leaf, below)
        or [inside + one for one in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.55)]
        or [one.name for one in known if one.leaf == leaf]
        or [one.name for one in known if one.leaf in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
        or _by_words(leaf, [one.name for one in known])
    )
    return found[:3]


def _by_words(given: str, names: Sequence[str]) -> list[str]:
    """The names with the most words that a word of `given` begins or resembles, the shortest first."""

    def has(word: str, name: str) -> bool:
        theirs = re.split(r"[._]", name)
        begun = len(word) > 3 and any(one.startswith(word) for one in theirs)
        return begun or bool(difflib.get_close_matches(word, theirs, cutoff=0.8))

    words = re.findall(r"[^\W_]+", given.lower())
    shared = {name: sum(has(word, name) for word in words) for name in names}
    most = max(shared.values(), default=0)
    return sorted((name for name in names if most and shared[name] == most), key=len)


def _table(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The part that a setting holds, and "NAME." where it is a table of parts, "N." where a list."""
    origin, among = typing.get_origin(annotation), typing.get_args(annotation) or (annotation,)
    parts = [one for one in among if isinstance(one, type) and issubclass(one, BaseModel)]
    return (parts[0], {tuple: "N.", dict: "NAME."}.get(origin, "")) if parts else (None, "")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


_SIGNS = ((annotated_types.Ge, "≥"), (annotated_types.Gt, ">"), (annotated_types.Le, "≤"), (annotated_types.Lt, "<"))


def _values(field: FieldInfo) -> str:
    """Describes the values of a setting, as "integer, 1 … 4096" or "none, fp8"."""
    kind = _kind(field.annotation)
    found = {type(one): one for one in reversed(field.metadata)}
    bounds = [f"{sign} {getattr(found[bound], bound.__name__.lower()):g}" for bound, sign in _SIGNS if bound in found]
    return ", ".join([kind, *bounds])


_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null", Any: "any"}


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(one) for one in arguments)
    if origin is tuple:
        return "list of " + (_kind(arguments[0]) if Ellipsis in arguments else ", ".join(map(_kind, arguments)))
    if origin is dict:
        return f"table of {_kind(arguments[1])}"
    return _KINDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
