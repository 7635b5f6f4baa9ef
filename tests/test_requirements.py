"""The pinned requirements go with the ranges of pyproject.toml: the oldest versions, and those of the images."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from flowfleet.scorers import folders

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIBRARIES = {folder.image: folder.library for folder in folders() if folder.library}
OWN_VERSIONS = {image for image, library in LIBRARIES.items() if library.own_versions}
"""Images of scorers whose library wants an old transformers: they agree with no other."""
IMAGES = {path.stem: path for path in (ROOT / "requirements/images").glob("*.txt")}


def ranges(extra: str) -> Iterator[Requirement]:
    """What an install of that extra asks for itself, the base install and extras of extras included."""
    for requirement in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]):
        if requirement.name == "flowfleet":
            for other in requirement.extras:
                yield from ranges(other)
        elif requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11", "extra": ""}):
            yield requirement


def pins(path: Path) -> dict[str, Version]:
    found = re.findall(r"^([a-z0-9.-]+)==([^ ;\\\n]+)", path.read_text(), re.MULTILINE)
    return {name: Version(version) for name, version in found}


def test_lowest_pins_the_lower_bound_of_every_range() -> None:
    """A withdrawn release is skipped: of 3.14 the first that is there may be 3.14.3."""
    lowest = pins(ROOT / "requirements/lowest.txt")
    for requirement in ranges("local"):
        pinned = lowest[canonicalize_name(requirement.name)]
        assert pinned in requirement.specifier, requirement
        for bound in requirement.specifier:
            if bound.operator == ">=":
                told = Version(bound.version).release
                assert pinned.release[: len(told)] == told, f"{requirement}: run `make lock`"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_pins_what_its_extra_asks_for(image: str) -> None:
    pinned = pins(IMAGES[image])
    for requirement in (*ranges(image), *ranges("traces")):
        if requirement.name not in ("torch", "torchvision"):
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, (
                f"{requirement}: run `make lock`"
            )


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_leaves_torch_to_its_device_and_has_a_hash_for_all_else(image: str) -> None:
    assert not {"torch", "triton", "nvidia-nccl-cu13", "nvidia-cublas"} & set(pins(IMAGES[image]))
    entries = re.split(r"^(?=[a-z0-9])", IMAGES[image].read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(IMAGES[image]))
    assert all("--hash=sha256:" in entry for entry in entries)


def test_an_image_has_one_version_of_a_package_on_both_pythons() -> None:
    """A marker leaves a package out for one Python; it never gives it another version there."""
    for path in IMAGES.values():
        names = re.findall(r"^([a-z0-9.-]+)==", path.read_text(), re.MULTILINE)
        assert len(names) == len(set(names)), path
    omni = pins(IMAGES["vllm-omni"])
    assert omni["cuda-python"] == omni["cuda-bindings"], "cuda-python takes the bindings of its own version alone"


def test_images_agree() -> None:
    """A trainer that computed with another version of a model than the rollout would give other log-probs."""
    assert set(IMAGES) == {"controller", "rollout", "reward", "reward-models", "vllm-omni", *LIBRARIES}
    versions: dict[str, Version] = {}
    for image in set(IMAGES) - OWN_VERSIONS:
        for name, version in pins(IMAGES[image]).items():
            assert versions.setdefault(name, version) == version, name
