"""Exported models as they lie in the folders of jobs."""

import zlib
from pathlib import Path

from flowfleet.job.model_files import ModelFile, ModelManifest


def write_model(folder: Path, job_id: str, step: int, data: bytes) -> ModelManifest:
    """A model of two files."""
    files = {"README.md": b"# card", "transformer_2/adapter_model.safetensors": data}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = ModelManifest(
        job_id=job_id,
        step=step,
        kind="adapter",
        weights="trained",
        base_model="m",
        dtype="float32",
        files={
            name: ModelFile(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
            for name, content in files.items()
        },
    )
    (folder / "flowfleet.json").write_text(manifest.model_dump_json())
    return manifest
