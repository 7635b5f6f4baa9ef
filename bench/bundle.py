"""Packs this commit, and the packages it needs, for a GPU machine that has PyTorch but no network.

    python -m bench.bundle DIRECTORY --python 3.12 --has torchvision numpy … --take huggingface-hub==1.33.0
    mkdir packages && tar xJf tree.tar.xz && tar xJf packages.tar.xz -C packages    # there
    export PYTHONPATH=packages:.

DIRECTORY gets tree.tar.xz and packages.tar.xz; their sizes are printed. The packages are those that the extra `local`
needs on that machine, each in the newest version that the first requirement of it accepts. `--has` names what is
installed there, or is not needed: `av` where no video is made, `rapidocr` where no word is read, `kubernetes`. `--take`
says which version fits what is installed there: transformers 5.17 wants huggingface-hub below 2.
"""

import argparse
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MACHINE: Final = "x86_64"
PLATFORMS: Final = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17")
OLDER: Final = ("manylinux2014", "manylinux_2_12", "manylinux2010", "manylinux_2_5", "manylinux1")
NEVER: Final = ("torch", "triton", "flowfleet")
"""Packages whose version the machine decides."""


def main() -> int:
    options = _parser().parse_args()
    target = [f"--python-version={options.python}", "--implementation=cp", "--only-binary=:all:"]
    target += [f"--platform={name}_{MACHINE}" for name in (*PLATFORMS, *OLDER)]
    environment = {"python_version": options.python, "python_full_version": f"{options.python}.0"}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": MACHINE}
    asked = [Requirement(one) for one in (*options.take, *(metadata.requires("flowfleet") or ()))]
    with tempfile.TemporaryDirectory() as scratch:
        seen = {str(canonicalize_name(name)) for name in (*options.has, *NEVER)}
        wheels, extras = list[Path](), with_their_own("local", asked)
        while wanted := missing(asked, seen, environment, extras):
            folder = Path(scratch) / str(len(seen))
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
            subprocess.run([*pip, "download", "--no-deps", *target, "-d", folder, *map(str, wanted)], check=True)
            new = sorted(folder.glob("*.whl"))
            asked = [Requirement(one) for wheel in new for one in required_by(wheel)]
            wheels, extras = wheels + new, [""]
        options.directory.mkdir(parents=True, exist_ok=True)
        made = [options.directory / name for name in ("tree.tar.xz", "packages.tar.xz")]
        pack_tree(made[0])
        pack(wheels, made[1])
    sizes = [path.stat().st_size / 2**20 for path in made]
    for path, size in zip(made, sizes, strict=True):
        print(f"{path}: {size:.1f} MiB")
    print(f"{sum(sizes):.1f} MiB in all, with {len(wheels)} packages")
    return 0


def pack_tree(output: Path) -> None:
    """Archives the files of the commit that is checked out."""
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with _whole(output) as part:
        part.write_bytes(lzma.compress(tree, preset=9))


@contextmanager
def _whole(output: Path) -> Iterator[Path]:
    """Gives a name to write to. The file gets its own name when it is complete."""
    part = output.with_name(f"{output.name}.part")
    yield part
    os.replace(part, output)


def with_their_own(extra: str, asked: Sequence[Requirement]) -> list[str]:
    """Returns the extra, those of this project that it stands for, and the empty one."""
    extras = [extra, ""]
    for name in extras:
        for one in asked:
            if one.name == "flowfleet" and one.marker is not None and one.marker.evaluate({"extra": name}):
                extras += sorted(one.extras - {*extras})
    return extras


def missing(
    asked: Sequence[Requirement], seen: set[str], environment: Mapping[str, str], extras: Sequence[str]
) -> list[Requirement]:
    """Returns requirements under one of the extras that are not seen yet, without markers; `seen` grows by them."""
    found = []
    for one in asked:
        applies = one.marker is None or any(one.marker.evaluate({**environment, "extra": extra}) for extra in extras)
        if (name := canonicalize_name(one.name)) not in seen and applies:
            seen.add(name)
            found.append(Requirement(f"{one.name}{one.specifier}"))
    return found


def required_by(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as source:
        (name,) = (one for one in source.namelist() if one.endswith(".dist-info/METADATA") and one.count("/") == 1)
        return message_from_bytes(source.read(name)).get_all("Requires-Dist") or []


def pack(wheels: Sequence[Path], output: Path) -> None:
    """Unpacks wheels into an archive as they lie in site-packages, with this package's own metadata."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _whole(output) as part,
        tarfile.open(part, "w:xz", preset=2) as archive,  # preset 9 takes minutes on a slow machine
    ):
        site, own = Path(folder), metadata.distribution("flowfleet")
        about = site / f"flowfleet-{own.version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(str(own.metadata))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as source:
                for item in _kept(source):
                    path = Path(source.extract(item, site))
                    path.chmod(0o755 if item.external_attr >> 16 & 0o111 else 0o644)
        archive.add(site, ".")


def _kept(source: zipfile.ZipFile) -> Iterator[zipfile.ZipInfo]:
    """Yields the files but for tests, types and scripts."""
    for item in source.infolist():
        top, *rest = item.filename.split("/")
        if not (item.is_dir() or top.endswith(".data") or item.filename.endswith(".pyi") or "tests" in rest):
            yield item


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bundle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python", required=True, help="the machine's, as 3.12")
    parser.add_argument("--has", nargs="+", default=[], metavar="PACKAGE", help="what is there")
    parser.add_argument("--take", nargs="+", default=[], metavar="REQUIREMENT", help="as name==version")
    return parser


if __name__ == "__main__":
    sys.exit(main())
