"""Rewards of a local stack, as `flowfleet up --reward` takes them.

ocr                            a scorer
pickscore:model=PATH           a scorer with settings, as key=value[,key=value]
pickscore:model=PATH,devices=3 on accelerators of its own, as 3 or 0-1
taste=pickscore:model=PATH     the same under a name of its own
mine=my_rewards.py:score       a function of a Python file
mine=my_reward.toml            the scorer `python` with the settings of a file
mine=10.0.0.7:9000             a service that runs elsewhere
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flowfleet.job.setting_files import change_table, read_table
from flowfleet.job.spec import REWARD_NAME
from flowfleet.local.pools import parse_devices
from flowfleet.scorers import known

_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")
_SETTINGS = re.compile(r".+\.(toml|ya?ml|json)")
_DEVICES = "devices="
_ADDRESS = re.compile(r"[^/\s]+:\d{1,5}")


@dataclass(frozen=True)
class Reward:
    """A reward of a stack: a scorer to start with its settings, or the address of a service."""

    name: str
    scorer: str | None = None
    settings: tuple[str, ...] = ()
    """key=value changes, as `--set` of the reward service takes them."""
    address: str | None = None
    devices: tuple[str, ...] = ()
    """Accelerators that it is confined to; none: it sees all."""
    settings_file: Path | None = None
    """Absolute path of the file that the reward service reads its settings from."""


def parse_reward(text: str) -> Reward:
    """Raises ValueError with the forms that are accepted."""
    head, equals, rest = text.partition("=")
    is_named = bool(equals) and ":" not in head
    name, value = (head, rest) if is_named else (text.partition(":")[0], text)
    if not re.fullmatch(REWARD_NAME, name):
        raise ValueError(f"--reward {text}: {name!r} is not a name: take up to 63 letters, digits, '_' and '-'")
    scorer, colon, changes = value.partition(":")
    if scorer in known() and bool(colon) == bool(changes):
        settings = tuple(changes.split(",")) if changes else ()
        if wrong := [one for one in settings if "=" not in one]:
            raise ValueError(f"--reward {text}: {wrong[0]!r} is not a setting: write key=value[,key=value]")
        devices = [one.removeprefix(_DEVICES) for one in settings if one.startswith(_DEVICES)]
        own = tuple(_absolute(one) for one in settings if not one.startswith(_DEVICES))
        return Reward(name, scorer, own, devices=parse_devices(",".join(devices)) if devices else ())
    if is_named and (found := _FUNCTION.fullmatch(value)):
        path = _existing(Path(found["file"]), text)
        function = f"function={path.stem}:{found['function']}"
        return Reward(name, "python", (function, f"path={path.parent}", _named(name)))
    if is_named and _SETTINGS.fullmatch(value):
        file = _existing(Path(value), text)
        folder = () if "path" in read_table(file, "a settings") else (f"path={Path.cwd()}",)  # of its module
        return Reward(name, "python", (_named(name), *folder), settings_file=file)
    if is_named and _ADDRESS.fullmatch(value):
        return Reward(name, address=value)
    forms = "SCORER:key=value, NAME=FILE.py:FUNCTION, NAME=FILE.toml or NAME=HOST:PORT"
    raise ValueError(f"unknown reward {text!r}: give a scorer ({', '.join(known())}), {forms}")


def _named(name: str) -> str:
    """The setting `name`, in quotes where it would be read as something else than text: nan, true, 1."""
    plain: dict[str, object] = {}
    change_table(plain, f"name={name}", "name=mine")
    return f"name={name}" if plain["name"] == name else f'name="{name}"'


def _existing(file: Path, text: str) -> Path:
    if not file.is_file():
        raise ValueError(f"--reward {text}: there is no file {file}")
    return file.resolve()


def _absolute(setting: str) -> str:
    """A setting whose value is a file or folder of this machine, by its absolute path: services run elsewhere."""
    key, _, value = setting.partition("=")
    return f"{key}={Path(value).resolve()}" if "/" in value and Path(value).exists() else setting
