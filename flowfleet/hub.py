"""Models of the Hugging Face Hub by name: ORG/NAME[@REVISION], wherever a model's folder may be given. Free of torch.

    pin             the commit of a name, asked once, when a job is submitted
    configurations  the folder with the few files that tell what a pipeline is
    pipeline        the folder with all that loading a diffusers pipeline reads
    checkpoint      the folder of a model in transformers' layout

Files are in huggingface_hub's cache, which `hf download` fills as well; HF_HOME moves it. A process downloads what
FLOWFLEET_HUB_MODELS lists, unless HF_HUB_OFFLINE is 1; all other names must be in the cache. HF_TOKEN opens gated
models and HF_ENDPOINT names another Hub.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from flowfleet.extras import pip_install

MODELS = "FLOWFLEET_HUB_MODELS"
"""ORG and ORG/NAME, separated by commas: what a fleet's services may download; `*` is everything."""
OFFLINE = "HF_HUB_OFFLINE"
LOOK_S = 1.0
"""Between two looks at how much of a download has arrived."""
ANSWER_S = 20.0
"""Longest wait for the commit of a name."""

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")
_LISTED = re.compile(r"\*|[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)(?:/snapshots/([0-9a-f]{40}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_INDEX = "model_index.json"
_CONFIGURATIONS = (_INDEX, "config.json", "*_config.json", "*/config.json", "*/scheduler_config.json")
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = ("diffusion_pytorch_model*.safetensors", "model*.safetensors")
_VARIANTS = ("*.*.safetensors",)
"""Copies of the weights in other data types, as `model.fp16.safetensors`."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubName:
    """A model of the Hub."""

    repo: str
    """ORG/NAME"""
    revision: str = ""
    """Branch, tag or commit; empty: the default branch."""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def is_pinned(self) -> bool:
        return bool(_COMMIT.fullmatch(self.revision))

    def download_line(self, include: str = "") -> str:
        """The command that puts the model into the cache."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repo}{revision}" + (f' --include "{include}"' if include else "")


def name_of(place: str | Path) -> HubName | None:
    """The name, where a place is one: no path that is there, and written as ORG/NAME[@REVISION]."""
    text = str(place)
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or os.path.exists(text):
        return None
    return HubName(match[1], match[2] or "")


def origin_of(place: str | Path) -> HubName | None:
    """The model of the Hub that a name or a folder of the cache is."""
    if match := _CACHED.search(str(place)):
        return HubName(f"{match[1]}/{match[2]}", match[3] or "")
    return name_of(place)


def parse_list(text: str) -> tuple[str, ...]:
    """Raises ValueError for what is not a name."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if not _LISTED.fullmatch(name):
            raise ValueError(f"{name!r} is neither ORG nor ORG/NAME of the Hub, nor *: correct --hub-model or {MODELS}")
    return names


def listed() -> tuple[str, ...]:
    """Returns the names that this process may download. Raises ValueError as `parse_list`."""
    return parse_list(os.environ.get(MODELS, ""))


def is_listed(name: HubName) -> bool:
    return bool({"*", name.repo, name.repo.partition("/")[0]} & set(listed()))


def check_listed(name: HubName) -> None:
    """Raises ValueError where jobs may not name this model."""
    if not is_listed(name):
        known = ", ".join(listed()) or "none is listed"
        raise ValueError(
            f"no folder {name} is here, and it is not among the Hub's models that jobs may name ({known}): download it "
            f"(`{name.download_line()} --local-dir FOLDER`) and give the folder, or list it by `flowfleet up "
            f"--hub-model {name.repo}` or the chart's hub.models"
        )


def pin(place: str) -> str:
    """ORG/NAME@COMMIT of a name; a path as it is. Asks the Hub, or the cache where this process downloads nothing.

    Raises ValueError where neither knows the name.
    """
    name = name_of(place)
    if name is None or name.is_pinned:
        return place
    if _downloads(name):
        from huggingface_hub import HfApi

        found = _asked(name, lambda: HfApi().model_info(name.repo, revision=name.revision or None, timeout=ANSWER_S))
        commit = str(found.sha)
    else:
        commit = _snapshot(name, (_INDEX,)).name
    return str(HubName(name.repo, commit))


def configurations(place: str | Path) -> Path:
    """The folder of a pipeline's configurations. Raises ValueError where they are not to be had."""
    name = name_of(place)
    return Path(place) if name is None else _snapshot(name, _CONFIGURATIONS, include="*.json")


def pipeline(place: str | Path, beat: Callable[[], None] | None = None) -> Path:
    """The folder of a model. Of a name it downloads the parts that `model_index.json` lists, and without that file the
    texts and weights of the folder itself.

    `beat` is called, in this thread, whenever more has arrived. Raises ValueError where the model is not to be had.
    """
    name = name_of(place)
    if name is None:
        return Path(place)
    first = _snapshot(name, (_INDEX, "config.json"))
    pinned = HubName(name.repo, first.name)
    if not (first / _INDEX).is_file():
        return _snapshot(pinned, (*_TEXTS, "*.safetensors"), ignored=("*/*", *_VARIANTS), beat=beat)
    wanted = [f"{part}/{glob}" for part in _parts(first / _INDEX) for glob in (*_TEXTS, *_WEIGHTS)]
    return _snapshot(pinned, (_INDEX, *wanted), ignored=_VARIANTS, beat=beat)


def checkpoint(place: str | Path) -> Path:
    """The folder of a model in transformers' layout. Raises ValueError where it is not to be had."""
    name = name_of(place)
    if name is None:
        return Path(place)
    return _snapshot(name, (*_TEXTS, "model.safetensors", "model-*.safetensors"), ignored=("*/*", *_VARIANTS))


def _parts(index: Path) -> list[str]:
    """Folders of a pipeline's components."""
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))
        return [part for part, made in entries.items() if isinstance(made, list) and any(made)]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read as the index of a pipeline: {error}") from error


def _downloads(name: HubName) -> bool:
    return is_listed(name) and os.environ.get(OFFLINE, "").upper() not in ("1", "ON", "YES", "TRUE")


def _snapshot(
    name: HubName,
    wanted: Sequence[str],
    *,
    ignored: Sequence[str] = (),
    include: str = "",
    beat: Callable[[], None] | None = None,
) -> Path:
    """The folder of a model's commit, with the files that match one of `wanted`."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ValueError(f"{name} is a model of the Hub, which needs huggingface_hub: {pip_install('hub')}") from None
    disable_progress_bars()
    fetch = partial(
        snapshot_download,
        name.repo,
        revision=name.revision or None,
        allow_patterns=list(wanted),
        ignore_patterns=list(ignored) or None,
    )
    store = Path(constants.HF_HUB_CACHE, f"models--{name.repo.replace('/', '--')}")
    if not _downloads(name):
        return Path(_asked(name, lambda: fetch(local_files_only=True), include))
    return Path(_watched(lambda: _asked(name, fetch, include), store / "blobs", name, beat or (lambda: None)))


def _asked(name: HubName, ask: Callable[[], T], include: str = "") -> T:
    """Returns huggingface_hub's answer. Turns its errors into a ValueError that says what to change."""
    from huggingface_hub import constants, errors

    try:
        return ask()
    except errors.GatedRepoError:
        reason = "its terms are to be accepted on the Hub, and HF_TOKEN be that of the account"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {name.revision!r} there"
    except errors.RepositoryNotFoundError:
        reason = "the Hub has no such model, or it is private and HF_TOKEN does not open it"
    except errors.LocalEntryNotFoundError as error:
        if not _downloads(name):
            raise ValueError(
                f"no folder {name} is here, and the Hub's model of this name is not, or not whole, in "
                f"{constants.HF_HUB_CACHE}: run `{name.download_line(include)}` where that is seen, or let services "
                f"download it by `flowfleet up --hub-model {name.repo}` or the chart's hub.models"
            ) from None
        reason = _brief(error.__cause__ or error)
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        reason = _brief(error)
    raise ValueError(
        f"no folder {name} is here, and the Hub did not give the model of this name: {reason}. Try again, or run "
        f"`{name.download_line(include)}`"
    )


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _watched(fetch: Callable[[], T], blobs: Path, name: HubName, beat: Callable[[], None]) -> T:
    """Runs `fetch` in a thread and beats while the cache of the model grows, whichever process fills it: others of this
    machine wait for the one that holds a file's lock."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(fetch())
        except BaseException as error:
            done.set_exception(error)

    before = size = _size(blobs)
    threading.Thread(target=run, name="hub", daemon=True).start()  # it does not keep a process that must end
    while not wait([done], LOOK_S).done:
        if (now := _size(blobs)) != size:
            size = now
            beat()
    if (arrived := _size(blobs) - before) > 0:
        log.info("%s: downloaded %.1f MiB", name, arrived / 2**20)
    return done.result()


def _size(folder: Path) -> int:
    """Bytes in a folder, whose files come and go meanwhile."""
    total = 0
    try:
        for entry in os.scandir(folder):
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                continue
    except FileNotFoundError:
        pass
    return total
