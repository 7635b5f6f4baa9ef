"""Which files and URLs a job may name: what lies below the operator's roots with links resolved, and listed URLs.

Every path of a job comes through here: data, images, media, model. A path is judged by where it leads, and an opened
file again by where the kernel found it, so a link that changes in between gains nothing. Hidden entries of the
controller's home directory, where keys are kept, need a root of their own. The controller's own state is never reached
by path: `job:ID` names another job's model, `job:ID@STEP` one of its checkpoints, `upload:SHA256/NAME` prompts of a
user.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from flowfleet import hub
from flowfleet.job.adapter_files import PEFT_CONFIG
from flowfleet.job.model_files import FOLDER, model_folder
from flowfleet.prompts.hub import check_place
from flowfleet.prompts.uploads import is_upload, parts_of

FORBIDDEN = ("/proc", "/sys", "/dev", "/run/secrets", "/var/run/secrets")
"""Folders in which the kernel and the cluster show secrets. No root makes these readable."""
OBJECT_STORES = ("s3", "gs", "az", "abfs", "oss")
HUB = "hf://datasets"
"""Allows all data sets of the Hugging Face Hub, in a list of URLs that jobs may read."""
SCHEMES = ("https", "http", "hf", *OBJECT_STORES)
"""Schemes of URLs that an operator may list."""
MAX_MODEL_FILES = 20_000

_EXPORT = re.compile(r"job:([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:@(\d{1,12}))?")
_IPV6_HOST = re.compile(r"//\[[0-9a-fA-F:.]+\]")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class NotAllowed(ValueError):
    """The operator's settings do not let a job read this; the message names the setting."""


@dataclass(frozen=True)
class Places:
    """Raises NotAllowed for everything that it does not list."""

    roots: tuple[Path, ...] = ()
    """Folders, links resolved."""
    urls: tuple[str, ...] = ()
    """SCHEME://HOST[:PORT] each, as `url_origin` gives them; an object store's host is its bucket."""
    state_dir: Path | None = None
    homes: tuple[Path, ...] = ()
    """Home directories of the controller's user."""

    @classmethod
    def of(cls, roots: Sequence[Path], urls: Sequence[str], state_dir: Path) -> Places:
        resolved = tuple(root.resolve() for root in roots)
        return cls(resolved, tuple(map(url_origin, urls)), state_dir.resolve(), tuple(_homes()))

    def check(self, place: str) -> None:
        """Raises NotAllowed unless a job may read this path or URL. Nothing is opened or fetched."""
        if is_remote(place):
            self._check_url(place)
        else:
            self.path(place)

    def path(self, place: str, *, may_be_gone: bool = False) -> Path:
        """Resolves a path. Raises NotAllowed if a job may not read there, whether something is there or not; of what a
        job made also if it is gone, unless it may be."""
        if is_job(place):
            return self._of_job(place, may_be_gone=may_be_gone)
        if is_upload(place):
            return self._of_upload(place)
        try:
            found = Path(os.path.realpath(place.removeprefix("file://")))
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                found.lstat()
        except (OSError, ValueError) as error:  # a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else error
            raise NotAllowed(f"{_shown(place)} cannot be a path: {reason}") from None
        self._check_resolved(found, place)
        return found

    def open(self, place: str) -> int:
        """A descriptor of a regular file that a job may read. Raises NotAllowed, and OSError if there is none."""
        descriptor = os.open(self.path(place), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            self._check_resolved(
                Path(os.readlink(f"/proc/self/fd/{descriptor}")), place, may_be_state=is_job(place) or is_upload(place)
            )
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{place} is not a regular file")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_file(self, place: str) -> bool:
        """True if the place is a regular file. Raises NotAllowed."""
        return self.path(place).is_file()

    def exists(self, place: str) -> bool:
        """True if the place is a regular file or a folder. Raises NotAllowed."""
        path = self.path(place)
        return path.is_file() or path.is_dir()

    def model(self, place: str, *, may_be_gone: bool = False) -> Path:
        """A model's or an adapter's folder or file, as trainers and rollouts see it; every file in it may be read too,
        and the configuration next to an adapter's file. Raises NotAllowed, as `path` does."""
        folder = self.path(place, may_be_gone=may_be_gone)
        if folder.is_file():
            self._check_resolved(Path(os.path.realpath(folder.with_name(PEFT_CONFIG))), place)
        for found in _links(folder):
            leads_to = Path(os.path.realpath(found))
            self._check_resolved(leads_to, str(found), may_be_state=is_job(place) and self._is_of_job(leads_to))
        return folder if is_job(place) else Path(place.removeprefix("file://"))

    def pipeline(self, place: str) -> Path:
        """Returns what `model` gives; a name of the Hub stays a name. Raises NotAllowed for a name that the operator
        did not list."""
        if (name := hub.name_of(place)) is None:
            return self.model(place)
        try:
            hub.check_listed(name)
        except ValueError as error:
            raise NotAllowed(str(error)) from None
        return Path(place)

    def checkpoint(self, place: str, *, may_be_gone: bool = False) -> Path:
        """A checkpoint's folder, as trainers see it. Raises NotAllowed, as `path` does."""
        folder = self.model(place, may_be_gone=may_be_gone)
        return folder.parent if is_job(place) and folder.name == FOLDER else folder

    def _check_resolved(self, path: Path, place: str, *, may_be_state: bool = False) -> None:
        if any(path.is_relative_to(folder) for folder in FORBIDDEN):
            raise NotAllowed(f"{_shown(place)} lies in one of {', '.join(FORBIDDEN)}: no job may read it")
        if self.state_dir is not None and path.is_relative_to(self.state_dir):
            if may_be_state:
                return
            raise NotAllowed(
                f"{_shown(place)} lies in the controller's state directory: name what a job made as job:ID, and a "
                "checkpoint as job:ID@STEP"
            )
        holding = [root for root in self.roots if path.is_relative_to(root)]
        if holding and (hidden := self._hidden(path)) and not any(root.is_relative_to(hidden) for root in holding):
            raise NotAllowed(
                f"{_shown(place)} lies in {hidden}: jobs may not read hidden files of a home directory. Move it, or "
                f"give the controller or `flowfleet up` --data-root {hidden}"
            )
        if not holding:
            known = ", ".join(map(str, self.roots)) or "none is set"
            raise NotAllowed(
                f"{_shown(place)} leads outside the folders that jobs may read ({known}): move it there, or give the "
                "controller or `flowfleet up` another --data-root"
            )

    def _hidden(self, path: Path) -> Path | None:
        """The entry of a home directory that holds the path, if its name begins with a dot."""
        inside = ((home, path.relative_to(home).parts) for home in self.homes if path.is_relative_to(home))
        return next((home / parts[0] for home, parts in inside if parts and parts[0].startswith(".")), None)

    def _is_of_job(self, path: Path) -> bool:
        """An export links what it did not train from the model that it began with, which may be an export too."""
        return self.state_dir is not None and path.is_relative_to(self.state_dir / "jobs")

    def _of_job(self, place: str, *, may_be_gone: bool) -> Path:
        match = _EXPORT.fullmatch(place)
        if match is None or self.state_dir is None:
            raise NotAllowed(
                f"{_shown(place)}: write job:ID for a job's exported model, job:ID@STEP for one of its checkpoints"
            )
        job_id, step = match.groups()
        job = self.state_dir / "jobs" / job_id
        path = Path(os.path.realpath(_made_by(job, None if step is None else int(step))))
        if not path.is_relative_to(job):
            raise NotAllowed(f"{place!r} leads out of its job's folder")
        if not path.is_dir() and not may_be_gone:
            what = "exported no model" if step is None else f"has no checkpoint of step {int(step)}"
            raise NotAllowed(f"{place!r}: job {job_id} {what} here")
        return path

    def _of_upload(self, place: str) -> Path:
        parts = parts_of(place)
        if parts is None or self.state_dir is None:
            raise NotAllowed(
                f"{_shown(place)} is not an uploaded prompt file. Pictures and videos of uploaded prompts are not "
                "uploaded: put them into a store or folder that the controller reads, and name them by URL or absolute "
                "path"
            )
        folder = self.state_dir / "uploads" / parts[0]
        path = folder / parts[1]
        if path.is_symlink() or not path.is_file():
            raise NotAllowed(f"{_shown(place)} is not here: it was deleted, or never uploaded; upload the file again")
        with suppress(OSError):
            os.utime(folder)
        return path

    def _check_url(self, place: str) -> None:
        try:
            origin = url_origin(place)
            if origin.startswith(HUB):
                check_place(place)
        except ValueError as error:
            raise NotAllowed(str(error)) from None
        if origin not in self.urls and not (origin.startswith(HUB) and HUB in self.urls):
            known = ", ".join(self.urls) or "none is set"
            raise NotAllowed(
                f"{_shown(place)} is at {origin}, which jobs may not read (allowed: {known}): copy it below a "
                "--data-root, or give the controller or `flowfleet up` --data-url " + origin
            )


def _made_by(job: Path, step: int | None) -> Path:
    """A job's model; of a step its checkpoint, which has every bit of an adapter, or the pipeline in that."""
    if step is None:
        return model_folder(job) or job / FOLDER
    checkpoint = job / "checkpoints" / f"step-{step:08d}"
    pipeline = checkpoint / FOLDER
    return pipeline if (pipeline / "model_index.json").is_file() else checkpoint


def _homes() -> Iterator[Path]:
    """Home folders by HOME and by the list of users, which may lack a container's user."""
    with suppress(RuntimeError):
        yield Path.home().resolve()
    with suppress(KeyError):
        yield Path(pwd.getpwuid(os.getuid()).pw_dir).resolve()


def is_remote(place: str) -> bool:
    """True for URLs; `file://` names a path of this machine."""
    return "://" in place and not place.startswith("file://")


def is_job(place: str) -> bool:
    """True for what another job made."""
    return place.startswith("job:")


def _shown(place: str) -> str:
    """The place as messages show it."""
    return repr(place if len(place) <= 200 else place[:200] + "…")


def url_origin(url: str) -> str:
    """SCHEME://HOST[:PORT], lower case, without a default port. Raises ValueError for chained or unknown protocols."""
    odd = any(character.isspace() or not character.isprintable() or character == "\\" for character in url)
    if odd or "::" in _IPV6_HOST.sub("//", url, count=1):
        raise ValueError(f"{_shown(url)}: give one plain URL, without chained protocols, spaces, backslashes")
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme not in SCHEMES:
        raise ValueError(f"{_shown(url)}: protocol {parts.scheme!r} is not supported; use one of {', '.join(SCHEMES)}")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{parts.scheme}://…@{parts.hostname}: remove the credentials; the controller has its own")
    if not parts.hostname:
        raise ValueError(f"{_shown(url)} names no host")
    if scheme == "hf":
        return _hub_origin(url, parts)
    if scheme in OBJECT_STORES:
        if ".." in url.split("/"):  # some clients take it for another bucket
            raise ValueError(f"{_shown(url)}: remove `..`, an object store has no folders")
        return f"{scheme}://{parts.netloc}"
    host = parts.hostname.rstrip(".")
    host = f"[{host}]" if ":" in host else host
    port = "" if parts.port in (None, _DEFAULT_PORTS[scheme]) else f":{parts.port}"
    return f"{scheme}://{host}{port}"


def _hub_origin(url: str, parts: SplitResult) -> str:
    """hf://datasets/ORG of a data set, or hf://datasets for all of them."""
    if parts.netloc != "datasets":
        check_place(url)
    organization = parts.path.strip("/").partition("/")[0]
    return f"{HUB}/{organization}".rstrip("/")


def _links(folder: Path) -> Iterator[Path]:
    """Whatever lies in a folder and leads elsewhere, also behind links to folders. Raises NotAllowed beyond bounds."""
    seen: set[str] = set()
    count = 0
    for parent, folders, files in os.walk(folder, followlinks=True):
        here = os.path.realpath(parent)
        if here in seen:
            folders.clear()
            continue
        seen.add(here)
        count += len(folders) + len(files)
        if count > MAX_MODEL_FILES:
            raise NotAllowed(f"{str(folder)!r} holds more than {MAX_MODEL_FILES} files: name the model's own folder")
        yield from (path for name in (*folders, *files) if (path := Path(parent, name)).is_symlink())
