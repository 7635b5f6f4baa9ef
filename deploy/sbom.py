"""The bill of materials of an image: its Python packages and those of its operating system, as CycloneDX JSON.

    python -m deploy.sbom ROOT --image REFERENCE --id sha256:… --output FILE

`docker/build` calls it for each image that it has built. Nothing is executed from ROOT, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

SITES = ("opt/flowfleet/lib/python3*/site-packages", "usr/local/lib/python3*/site-packages")
"""Where images have Python packages: Flowfleet's environment, and the base image's own."""


def bill(root: Path, image: str, image_id: str) -> str:
    """CycloneDX JSON of the image whose file system is at `root`. Raises ValueError if there are no packages."""
    sites = [found for site in SITES for found in sorted(root.glob(site))]
    system = list(_system_packages(root))
    if not sites and not system:
        raise ValueError(f"{root} has no packages of Python or of Debian: name the file system of an image")
    bom = _python_packages(sites)
    bom.components.update(system)
    bom.metadata.component = Component(type=ComponentType.CONTAINER, name=image, version=image_id, bom_ref=image)
    bom.register_dependency(bom.metadata.component, bom.components)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)


def _python_packages(sites: Sequence[Path]) -> Bom:
    """What cyclonedx-py finds. It asks an interpreter for its path; that of the image cannot run here."""
    with tempfile.TemporaryDirectory() as place:
        (answer := Path(place, "path.json")).write_text(json.dumps([place, *map(str, sites)]))
        (asked := Path(place, "python")).write_text(f"#!/bin/sh\nexec cat '{answer}'\n")
        asked.chmod(0o700)
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", str(asked)]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    bom: Bom = Bom.from_json(json.loads(found))  # type: ignore[attr-defined]
    return bom


def _system_packages(root: Path) -> Iterator[Component]:
    """Debian's, from dpkg's own list; none in an image without dpkg."""
    status = root / "var/lib/dpkg/status"
    release = dict(line.partition("=")[::2] for line in _text(root / "usr/lib/os-release").splitlines())
    system, version = (release.get(key, "").strip('"') for key in ("ID", "VERSION_ID"))
    for paragraph in filter(str.strip, _text(status).split("\n\n")):
        package = HeaderParser().parsestr(paragraph)
        if package["Status"].split()[-1] != "installed":
            continue
        qualifiers = {"arch": package["Architecture"], "distro": f"{system}-{version}"}
        url = PackageURL("deb", system or "debian", package["Package"], package["Version"], qualifiers)
        yield Component(
            type=ComponentType.LIBRARY,
            name=package["Package"],
            version=package["Version"],
            purl=url,
            bom_ref=url.to_string(),
        )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy.sbom", description="Write the bill of materials of an image.")
    parser.add_argument("root", type=Path, help="the image's file system")
    parser.add_argument("--image", required=True, help="its name")
    parser.add_argument("--id", required=True, help="its id, the sha256 of its configuration")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.write_text(bill(given.root, given.image, given.id) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
