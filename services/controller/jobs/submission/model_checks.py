"""Checks of what a job's model can do."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from flowfleet import hub
from flowfleet.job.rules import sequences
from flowfleet.job.spec import JobSpec
from flowfleet.media.files import MediaLimits
from flowfleet.models.registry import FAMILIES, ModelFamily, family_of
from flowfleet.planning.storage import held_steps, latent_elements, pixels_per_latent, prompt_bytes, storage
from services.controller.jobs.submission.problems import InvalidJob
from services.controller.prompts.sources import Sources


def pinned(spec: JobSpec, sources: Sources) -> JobSpec:
    """The job with the commit of its model and its configurations at hand, so that all services load the same files."""
    if hub.name_of(spec.model.path) is None:
        return spec
    try:
        path = hub.pin(str(sources.places.pipeline(spec.model.path)))
        hub.configurations(path)
    except ValueError as error:
        raise InvalidJob([f"model.path: {error}"]) from None
    return spec.model_copy(update={"model": spec.model.model_copy(update={"path": path})})


def family_at(path: str, sources: Sources) -> ModelFamily:
    folder = hub.configurations(sources.places.pipeline(path))
    if not any(_is_readable(folder / name) for name in ("model_index.json", "config.json")):
        raise ValueError(
            f"{path!r} holds no readable model_index.json or config.json; give the directory of a diffusers pipeline, "
            "or of a transformers model that writes text, as an absolute path that controller, rollouts and trainer "
            "all see"
        )
    return family_of(folder)


def _is_readable(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except (OSError, ValueError):  # a name that no file can have
        return False


def family_problems(spec: JobSpec, family: ModelFamily) -> Iterator[str]:
    rollout = spec.rollout
    if kind := sequences.refusal(family, spec.loss):
        yield f"algorithm.loss = {spec.loss.name}: {kind}"
    if spec.method.data == "preferences" and family.sounds:
        yield (
            f"algorithm.name = {spec.method.name}: {family.title} learns from films with sound, and films of a data "
            "set are read without; choose an algorithm that samples, such as online_dpo"
        )
    if rollout.num_frames > 1 and family.modality == "image":
        videos = ", ".join(known.title for known in FAMILIES.values() if known.modality == "video") or "none yet"
        yield (
            f"rollout.num_frames = {rollout.num_frames}: {family.title} makes pictures; set it to 1, or choose a video "
            f"model: {videos}"
        )
    if rollout.embedded_guidance is not None and not family.embedded_guidance:
        yield f"rollout.embedded_guidance has no effect on {family.title}: leave it out, or use rollout.guidance_scale"
    for name in ("image_guidance_scale", "guidance_renorm"):
        if getattr(rollout, name) is not None and not family.branch_guidance:
            yield f"rollout.{name} has no effect on {family.title}: leave it out, or use rollout.guidance_scale"
    tokens, most = spec.model.max_sequence_length, family.max_sequence_length
    if tokens is not None and most is None:
        yield f"model.max_sequence_length has no effect on {family.title}, which cuts no prompts: leave it out"
    elif tokens is not None and most is not None and tokens > most:
        yield f"model.max_sequence_length = {tokens}: {family.title} takes at most {most} tokens"
    if spec.trainer.mesh.degree > 1 and not family.shares_tokens:
        yield f"trainer.mesh.sequence = {spec.trainer.mesh.degree}: {family.title} cannot split a sample; set it to 1"
    if rollout.from_image and not family.holds_first_frame:
        yield f"rollout.from_image has no effect on {family.title}: leave it out"
    if rollout.sound_share is not None and not family.sounds:
        yield f"rollout.sound_share has no effect on {family.title}, whose films are silent: leave it out"
    if rollout.condition_pixels is not None and (not family.takes_images or family.modality == "video"):
        why = "brings images to the video's size" if family.takes_images else "takes no images"
        yield f"rollout.condition_pixels has no effect on {family.title}, which {why}: leave it out"


def checkpoint_problems(spec: JobSpec, family: ModelFamily, sources: Sources) -> Iterator[str]:
    """Sizes and guidance that the checkpoint would refuse or ignore."""
    frames, step = spec.rollout.num_frames, family.frame_multiple
    if family.modality == "video" and (frames - 1) % step:
        less = frames - (frames - 1) % step
        yield (
            f"rollout.num_frames = {frames}: {family.title} makes 1 more than a multiple of {step} frames; set it to "
            f"{less} or {less + step}"
        )
    folder = hub.configurations(sources.places.pipeline(spec.model.path))
    if spec.rollout.guidance.is_on and not family.guides_distilled and _says(folder, "is_distilled"):
        yield (
            f"rollout.guidance_scale = {spec.rollout.guidance_scale}: this {family.title} checkpoint is distilled and "
            "ignores guidance; set it to 1"
        )
    if spec.rollout.from_image and family.first_frame_flag and not _says(folder, family.first_frame_flag):
        yield f"rollout.from_image: this {family.title} checkpoint makes videos from text alone; leave it out"
    multiple = pixel_multiple(spec, family, sources)
    rollout, schedule = spec.rollout, spec.schedule
    sides = {
        "rollout.height": rollout.height,
        "rollout.width": rollout.width,
        "schedule.validation_height": schedule.validation_height,
        "schedule.validation_width": schedule.validation_width,
    }
    for setting, pixels in sides.items():
        if pixels is not None and pixels % multiple:
            yield f"{setting} = {pixels}: this {family.title} checkpoint draws multiples of {multiple} pixels"


def storage_problems(spec: JobSpec, sources: Sources, held_out: int, room: int) -> Iterator[str]:
    """Samples that would not fit Redis, where the model's configurations say how large they are."""
    folder = hub.configurations(sources.places.pipeline(spec.model.path))
    latent = 0 if spec.writes_tokens else latent_elements(folder, spec.rollout.size)
    if latent is None:
        return
    stored = storage(spec, latent=latent, embeds_bytes=prompt_bytes(folder, spec), held_out=held_out)
    if stored.needed > room:
        yield (
            f"schedule.save_every = {spec.schedule.save_every}: samples of {held_steps(spec)} steps are kept for "
            f"recovery, and the job would hold {stored.needed / 2**30:.3g} GiB in Redis ({stored}), where jobs pause "
            f"above {room / 2**30:.3g} GiB: lower schedule.save_every, schedule.keep_last, schedule.keep_pictures or "
            "schedule.validation_samples, or have the operator move blobs out of Redis (FLOWFLEET_BLOBS) or give it "
            "more memory"
        )


def _says(path: Path, name: str) -> bool:
    """Reads a switch of the checkpoint's index."""
    try:
        return bool(json.loads((path / "model_index.json").read_text(encoding="utf-8")).get(name))
    except (OSError, ValueError, AttributeError):  # the adapter will say what is wrong with it
        return False


def pixel_multiple(spec: JobSpec, family: ModelFamily, sources: Sources) -> int:
    """Pixels of which the checkpoint draws multiples; 1 where it does not say."""
    path = hub.configurations(sources.places.pipeline(spec.model.path))
    if family.vae_multiple is None:
        return 1
    try:
        config = json.loads((path / "vae" / "config.json").read_text(encoding="utf-8"))
        return max(1, pixels_per_latent(config) * family.vae_multiple)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # the adapter will say what is wrong
        return 1


def weight_problems(spec: JobSpec, family: ModelFamily, sources: Sources) -> Iterator[str]:
    """Names missing or broken files of the model; services fetch those of a Hub name themselves."""
    if spec.model.load_format == "safetensors" and hub.name_of(spec.model.path) is None:
        try:
            family.check_files(sources.places.pipeline(spec.model.path))
        except ValueError as error:
            yield f"model.path: {error}"


def limit_problems(spec: JobSpec) -> Iterator[str]:
    """Samples that every reward would refuse unread."""
    if not spec.rewards:
        return
    limits, rollout, shown = MediaLimits(), spec.rollout, spec.validation_size
    if excess := limits.excess(rollout.width, rollout.height, rollout.num_frames):
        yield f"rollout: samples of {excess} by rewards; lower rollout.num_frames, height or width"
    elif excess := limits.excess(shown.width, shown.height, shown.num_frames):
        yield f"schedule: held-out samples of {excess} by rewards; lower schedule.validation_height or _width"
