"""Files by which other schedulers start a trainer: valid by their own schemas, and the demo run inside Ray."""

from __future__ import annotations

import lzma
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "launch"
CRDS = Path(os.environ.get("FLOWFLEET_CRDS") or "/nowhere")
"""File of custom resources' definitions, KubeRay's among them; may be packed with xz."""


def _command(text: str) -> list[str]:
    """Words after torchrun's own."""
    words = text.replace("\\\n", " ").split()
    return words[words.index("-m") :]


def test_every_file_starts_the_trainer_module() -> None:
    ray = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    sky = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())["run"]
    shell = (FOLDER / "torchrun.sh").read_text().rpartition("exec ")[2]
    for text in (ray, sky, shell):
        assert _command(text)[:3] == ["-m", "services.trainer", "--controller"]
        assert "torchrun" in text
    subprocess.run(["sh", "-n", FOLDER / "torchrun.sh"], check=True)


@pytest.mark.skipif(not CRDS.is_file(), reason="needs FLOWFLEET_CRDS, a file with KubeRay's CRDs")
def test_the_ray_job_has_kuberays_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with lzma.open(CRDS, "rt") if CRDS.suffix == ".xz" else CRDS.open() as file:
        text = file.read()
    crds = {crd["spec"]["names"]["kind"]: crd for crd in yaml.safe_load_all(text) if crd}
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    versions = {version["name"]: version["schema"]["openAPIV3Schema"] for version in crds["RayJob"]["spec"]["versions"]}
    jsonschema.validate(job, _strict(versions["v1"]))


def _strict(schema: Any) -> Any:
    """The schema as the API server has it with strict validation: unknown fields fail."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(value) for name, value in schema.items() if name != "x-kubernetes-validations"}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if (
        isinstance(made.get("properties"), dict)
        and made.get("type") == "object"
        and "apiVersion" not in made["properties"]
    ):
        made.setdefault("additionalProperties", False)
    return made
