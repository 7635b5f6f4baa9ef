"""REST: the trained model of a job, file by file."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse

from flowfleet.errors import Conflict, NotFound
from flowfleet.job.model_files import ModelManifest, model_folder, read_manifest
from flowfleet.part import rule
from services.controller.api.dependencies import KnownJobId, Services, Use
from services.controller.api.routes.history import MAX_STEP, OTHER_MEDIA

router = APIRouter(prefix="/v1/jobs/{job_id}/model", tags=["models"])

Step = Annotated[
    int | None, Query(ge=0, le=MAX_STEP, description="Of a kept checkpoint; without it, the longest trained.")
]
FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file", "content": {OTHER_MEDIA: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.get("")
async def show_model(job_id: KnownJobId, use: Use, step: Step = None) -> ModelManifest:
    """Describes the model and its files."""
    return (await asyncio.to_thread(_find, use, job_id, step))[1]


@router.get("/files/{name:path}", response_class=Response, responses=FILE)
async def model_file(
    job_id: KnownJobId,
    name: str,
    use: Use,
    step: Step = None,
    crc32: Annotated[
        str | None,
        Query(
            pattern=rule("^[0-9a-f]{8}$", "give 8 hex digits, as the manifest has them"),
            description="As the manifest has it: 409 once the model is another.",
        ),
    ] = None,
) -> Response:
    """Downloads one file of the model."""
    path, digest = await asyncio.to_thread(_file, use, job_id, step, name)
    if crc32 is not None and crc32 != digest:
        raise Conflict(f"{name} now belongs to a newer model: request the model again")
    return FileResponse(path, media_type=OTHER_MEDIA, headers={"X-Content-Type-Options": "nosniff"})


def _find(use: Services, job_id: str, step: int | None) -> tuple[Path, ModelManifest]:
    folder = model_folder(use.settings.state_dir.resolve() / "jobs" / job_id, step)
    if folder is None:
        where = "no model yet" if step is None else f"no checkpoint of step {step} with a model"
        raise NotFound(
            f"job {job_id} has {where}: LoRA jobs export one with each checkpoint (schedule.save_every), jobs of full "
            "weights at their end, or with schedule.save_full"
        )
    try:
        return folder, read_manifest(folder)
    except ValueError as error:
        raise NotFound(str(error)) from None


def _file(use: Services, job_id: str, step: int | None, name: str) -> tuple[Path, str]:
    """Only what the manifest lists, and what really lies in the model's folder."""
    folder, manifest = _find(use, job_id, step)
    known, path = manifest.files.get(name), (folder / name).resolve() if "\0" not in name else folder
    if known is None or not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise NotFound(f"the model of job {job_id} has no file {name[:200]!r}")
    return path, known.crc32
