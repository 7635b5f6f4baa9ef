"""The demos by name: recipe, rewards, and what each needs first.

Small models are in the repository. A larger one is made by a module of the repository, once, in the user's cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flowfleet.process.service import end_with_parent

FREE_BYTES = 256 * 2**20
"""Free space of the cache below which nothing is made: a model takes 35 MiB."""


@dataclass(frozen=True)
class Made:
    """A file or folder that a module of the repository makes."""

    path: Path
    command: str
    """The module, with its flags but `--output`."""
    what: str = "the demo's model"
    or_else: str = "start the demo again, or set FLOWFLEET_DEVICE=cpu to train a smaller model on CPUs"
    """What one may do once the reason of a failure is mended."""

    def make(self, say: Callable[[str], None], environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Makes it where it is missing: in a folder next to it, which is renamed when whole. `say` gets each line of
        the module's log, which runs with these changes of the environment.

        Raises ValueError where the disk is full or the module fails.
        """
        if self.path.exists():
            return
        cache = self.path.parent
        cache.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(cache).free) < FREE_BYTES:
            raise ValueError(
                f"{cache} has {free >> 20} MiB left, and {self.what} needs {FREE_BYTES >> 20}: free some, or name "
                "another cache by XDG_CACHE_HOME"
            )
        say(f"Making {self.what}, once, by `python -m {self.command}`:")
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{self.path.name}-") as aside:
            whole = Path(aside) / "whole"
            if failed := _run(self.command, whole, say, environment):
                raise ValueError(f"{self.what} was not made: {failed}\nFix that and {self.or_else}.")
            if not self.path.exists():  # another demo may have made it meanwhile
                os.rename(whole, self.path)
        say(f"{self.path} is made.\n")


def _run(command: str, output: Path, say: Callable[[str], None], environment: Mapping[str, str]) -> str:
    """How the module failed; empty where it did not."""
    argv = [sys.executable, "-m", *command.split(), "--output", str(output)]
    last = "it said nothing"
    with subprocess.Popen(
        argv,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=end_with_parent,
    ) as process:
        assert process.stderr is not None
        try:
            for line in filter(None, map(str.rstrip, process.stderr)):
                say(last := line)
        except BaseException:  # Ctrl-C too
            process.kill()
            raise
    code = process.returncode
    return f"`python -m {command}` ended with code {code}: {last}" if code else ""


@dataclass(frozen=True)
class Demo:
    """A recipe that comes with Flowfleet, and how the rewards start that no scorer is named after."""

    recipe: Path
    rewards: tuple[str, ...] = ()
    """Arguments of `flowfleet up --reward`."""
    needs: tuple[Made, ...] = ()
    """What has to be there; the user is asked to make what is not."""
    code: Path | None = None
    """Folder of the repository whose code is imported from the working folder; no wheel has it."""
    model: Made | None = None
    """The model that is trained, in place of the recipe's; the demo makes it."""
    on_gpu: Demo | None = None
    """What takes the place of this demo on a machine with a GPU."""

    @property
    def changes(self) -> tuple[str, ...]:
        """Settings of the recipe that this machine decides."""
        return () if self.model is None else (f"model.path={self.model.path}",)

    def of(self, recipe: Path) -> Demo:
        """The demo with another recipe, which names its own model."""
        return Demo(recipe, self.rewards, self.needs, self.code)

    def here(self) -> Demo:
        """The demo for the device that services of this machine compute on."""
        if self.on_gpu is None:
            return self
        from flowfleet.hardware import devices  # torch takes seconds to import

        return self.on_gpu if devices.pick_kind() == "cuda" else self

    def require(self) -> None:
        """Raises ValueError with the commands for what is missing, and outside of the repository where it is needed."""
        if self.code is not None and not self.code.is_dir():
            raise ValueError(f"this demo needs {self.code} of the repository: run it in the folder of a clone")
        if missing := [one for one in self.needs if not one.path.exists()]:
            commands = "\n".join(f"    python -m {one.command} --output {one.path}" for one in missing)
            raise ValueError(f"this demo's model and judges are made first, on a GPU in minutes:\n{commands}")


_COMPOSITION = Path("recipes/composition")  # of the working folder: a wheel has none of its code
_JUDGES = _COMPOSITION / "judges"
_WEIGHTS = Path(os.environ.get("FLOWFLEET_COMPOSITION_JUDGES", _JUDGES / "weights"))  # as their service reads them
_REWARDS = (f"composition={_JUDGES}/reward.toml", f"composition_judge={_JUDGES}/heldout.toml")
_JUDGES_MADE = (
    Made(_WEIGHTS / "reward-64.safetensors", "recipes.composition.judges.train_reward --world small"),
    Made(_WEIGHTS / "heldout-64.safetensors", "recipes.composition.judges.train_heldout --world small"),
)
_PRETRAIN = "recipes.composition.pretrain --world small"
_WIDER = "--blocks 6 --heads 8 --rate 1e-3 --steps 70000"
_USERS_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
_WIDER_NAME = "-".join(["small", *_WIDER.split()[1::2]])  # other flags make another model
_WIDER_PATH = (_USERS_CACHE / "flowfleet" / "composition" / _WIDER_NAME).absolute()  # next to the atlas
WIDER: Final = Made(_WIDER_PATH, f"{_PRETRAIN} {_WIDER}")
"""Composition's model for GPUs, on which its algorithms are compared."""
DEMOS: Final = {
    "signs": Demo(Path("tiny_ocr")),
    "composition": Demo(
        Path("composition_small_awm"),
        _REWARDS,
        (Made(_COMPOSITION / "model", _PRETRAIN), *_JUDGES_MADE),
        _COMPOSITION,
        on_gpu=Demo(
            Path("composition_wide_awm"),
            _REWARDS,
            _JUDGES_MADE,
            _COMPOSITION,
            WIDER,
        ),
    ),
}
"""What `flowfleet demo` shows, by name."""
