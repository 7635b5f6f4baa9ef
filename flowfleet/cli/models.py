"""`flowfleet finish`, `extend`, `set`, `export` and `push`: a job's model kept and moved (docs/models-kept.md)."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flowfleet import hub, plugins
from flowfleet.api.jobs import Job, Priority
from flowfleet.cli import views
from flowfleet.cli.options import Ca, JobId, Json, Url, out, tell
from flowfleet.client import Client
from flowfleet.job.model_files import MANIFEST, ModelManifest, read_manifest
from flowfleet.models.registry import FAMILIES

Step = Annotated[int | None, typer.Option(min=0, help="A kept checkpoint's; default: the longest trained model.")]


def extend(
    job_id: JobId,
    steps: Annotated[int, typer.Option(min=1, help="Training steps in all.")],
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Give a job that has not ended another number of training steps."""
    with Client(url, ca=ca) as client:
        views.say(client.extend(client.find(job_id).id, steps), json_)


def set_(
    job_id: JobId,
    priority: Annotated[Priority, typer.Option(help="How fast the job moves forward in the queue.")],
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Give a job another priority."""
    with Client(url, ca=ca) as client:
        views.say(client.prioritize(client.find(job_id).id, priority), json_)


def export(
    job_id: JobId,
    step: Step = None,
    merge: Annotated[bool, typer.Option("--merge", help="Write the whole pipeline, adapter merged in.")] = False,
    base: Annotated[
        Path | None, typer.Option(help="With --merge: the base model here; default: the path that the job trained.")
    ] = None,
    out_: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="New folder; default: NAME-step-N.")] = None,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Bring a job's model to this machine."""
    with Client(url, ca=ca) as client:
        job = client.find(job_id)
        manifest = client.model(job.id, step)
        folder = out_ or Path(f"{job.name}-step-{manifest.step}{'-merged' if merge else ''}")
        if merge and manifest.kind == "adapter":
            _merged(client, job, step, base, folder)
        else:
            client.download_model(job.id, folder, step)
    tell({"folder": folder, **manifest.model_dump()}, json_, lambda: _show(manifest, folder))


def list_models(json_: Json = False) -> None:
    """List the models that jobs can train: their classes, what they make, and the engines that sample them."""
    plugins.load()
    facts = ("pipeline", "title", "modality", "takes_images", "images_optional", "max_sequence_length", "engines")
    found = [{name: getattr(family, name) for name in facts} for family in FAMILIES.values()]

    def show() -> None:
        for one in found:
            images = f", from {'0' if one['images_optional'] else '1'} to {one['takes_images']} images"
            makes = f"{one['modality']}{images if one['takes_images'] else ''}"
            line = f"{one['title']:<34} {one['pipeline']:<44} {makes:<28} {', '.join(one['engines'])}"
            out.print(line, highlight=False, markup=False, soft_wrap=True)

    tell(found, json_, show)


def check_model(
    model: Annotated[str, typer.Argument(metavar="FOLDER_OR_PLUGIN", help="A model's folder, best a tiny one.")],
    json_: Json = False,
) -> None:
    """Check that Flowfleet samples, trains, saves and loads a model as its library does; exits with 1 if it cannot."""
    from flowfleet.conformance.models import check_model as checked

    results = []
    for result in checked(model):
        results.append(result)
        if not json_:
            detail = f": {result.detail}" if result.detail else ""
            out.print(f"{result.status:<4} {result.name}: {result.rule}{detail}", highlight=False, markup=False)
    if json_:
        tell(results, json_, lambda: None)
    if any(result.status == "fail" for result in results):
        raise typer.Exit(1)


def push(
    job_id: JobId,
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Model repository; made if it is not there.")],
    step: Step = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    url: Url = None,
    ca: Ca = None,
    json_: Json = False,
) -> None:
    """Upload a job's model to the Hugging Face Hub, with your own login there."""
    from flowfleet.client.models.hub import upload

    with Client(url, ca=ca) as client, tempfile.TemporaryDirectory(prefix="flowfleet-") as folder:
        job = client.find(job_id)
        manifest = client.download_model(job.id, folder, step)
        place = upload(Path(folder), repo, f"{job.name}, step {manifest.step}, job {job.id}", private=private)
    tell({"place": place}, json_, lambda: out.print(place, highlight=False))


def _merged(client: Client, job: Job, step: int | None, base: Path | None, folder: Path) -> None:
    from flowfleet.client.models.merging import merge

    if folder.exists():
        raise ValueError(f"{folder} is there already: give a new folder by --out")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adapter-", dir=folder.parent) as adapter:
        manifest = client.download_model(job.id, Path(adapter), step)
        merge(hub.pipeline(base or manifest.base_model), Path(adapter), folder)


def _show(manifest: ModelManifest, folder: Path) -> None:
    kind = read_manifest(folder).kind if (folder / MANIFEST).is_file() else "pipeline"
    out.print(f"{folder}: {kind} of {manifest.step} steps, {manifest.weights} weights", highlight=False)
