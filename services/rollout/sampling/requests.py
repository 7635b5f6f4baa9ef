"""From the wire's GenerateRequest to the engine's request. What a client can get wrong is said here, as ValueError."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast, get_args

from flowfleet.algorithms.registry import STEPS
from flowfleet.algorithms.samplers import SamplerName
from flowfleet.limits import MAX_IMAGES, MAX_PROMPT_BYTES, check_bytes
from flowfleet.models.settings import Guidance, Renorm, Size
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.redis.keys import check_job_id
from services.rollout.engines.base import GenerationRequest, Noise, PromptGroup, Record, Sampling, SequenceSampling
from services.rollout.engines.turns import Share

MAX_SAMPLES = 65_536
MAX_STEPS = 1000
MAX_SIDE = 8192
MAX_FRAMES = 1025
MAX_TOKENS = 2**20
PURPOSES = (common_pb2.PURPOSE_TRAIN, common_pb2.PURPOSE_VALIDATE, common_pb2.PURPOSE_PREVIEW)
WRONG_PURPOSE = "purpose: give PURPOSE_TRAIN, PURPOSE_VALIDATE or PURPOSE_PREVIEW"
NO_SAMPLING = Sampling(Size(0, 0, 1), 0)
"""Placeholder in requests for a policy that writes tokens."""


def generation_request(request: rollout_pb2.GenerateRequest) -> GenerationRequest:
    """The engine's view of a request, rows in (group, index) order. Raises ValueError with what to change."""
    check_job_id(request.job_id)
    if request.sampling.HasField("sequence"):
        return _of_tokens(request)
    groups = _groups(request.groups, is_guided=request.sampling.guidance_scale > 1)
    sampling = _sampling(request.sampling)
    noise = _noise(request.noise, sampling.num_steps)
    record = _record(request, noise)
    if request.reference_kl and (record == "none" or not noise.steps or any(group.media for group in groups)):
        raise ValueError("reference_kl is measured at noisy steps: give PURPOSE_TRAIN, and sde_steps with eta > 0")
    return GenerationRequest(groups, sampling, noise, record, request.reference_kl, profile=request.profile)


def share_of(request: rollout_pb2.GenerateRequest, key: Hashable | None) -> Share:
    """Returns what the request's job may have of the engine. `key`: that of the forward. Raises ValueError."""
    share = request.share
    if not (math.isfinite(share.weight) and share.weight >= 0):
        raise ValueError(f"share.weight = {share.weight}: give a finite number of at least 0; 0 means 1")
    return Share(request.job_id, share.owner, share.weight or 1.0, None if share.alone else key, share.rows)


def _of_tokens(request: rollout_pb2.GenerateRequest) -> GenerationRequest:
    """The same of a policy that writes tokens."""
    groups = _groups(request.groups, is_guided=False, is_mixed=True)
    if any(message.media for message in request.groups):
        raise ValueError("groups.media: a policy that writes tokens takes no finished media, remove them")
    if request.reference_kl or request.noise.sde_steps:
        raise ValueError("noise, reference_kl: a policy that writes tokens has no denoising steps, remove them")
    if request.purpose not in PURPOSES:
        raise ValueError(WRONG_PURPOSE)
    is_training = request.purpose == common_pb2.PURPOSE_TRAIN
    if is_training and request.record != common_pb2.RECORD_TOKENS:
        raise ValueError("record: training samples of a policy that writes tokens need RECORD_TOKENS")
    sequence = sequence_sampling(request.sampling.sequence, is_training=is_training)
    record: Record = "tokens" if is_training else "none"
    return GenerationRequest(groups, NO_SAMPLING, Noise(), record, sequence=sequence, profile=request.profile)


def sequence_sampling(message: rollout_pb2.SequenceSampling, *, is_training: bool) -> SequenceSampling:
    """How tokens are drawn. Raises ValueError that names the field to change."""
    if not 0 < message.max_tokens <= MAX_TOKENS:
        raise ValueError(f"sampling.sequence.max_tokens = {message.max_tokens}: give 1 to {MAX_TOKENS}")
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise ValueError(f"sampling.sequence.temperature = {message.temperature}: give a finite number of at least 0")
    if is_training and message.temperature == 0:
        raise ValueError("sampling.sequence.temperature = 0 draws nothing: training samples need one above 0")
    if not 0 < message.top_p <= 1:
        raise ValueError(f"sampling.sequence.top_p = {message.top_p}: give a number above 0, at most 1")
    if not all(message.stop):
        raise ValueError("sampling.sequence.stop: an empty text would end every sequence, remove it")
    return SequenceSampling(
        message.max_tokens,
        message.temperature,
        message.top_p,
        tuple(message.stop),
        message.max_prompt_tokens or None,
        message.routed_experts,
    )


def _record(request: rollout_pb2.GenerateRequest, noise: Noise) -> Record:
    is_training = request.purpose == common_pb2.PURPOSE_TRAIN
    is_final = request.record == common_pb2.RECORD_FINAL
    if request.purpose not in PURPOSES:
        raise ValueError(WRONG_PURPOSE)
    if any(group.media for group in request.groups) and not (is_training and is_final):
        raise ValueError("groups.media: give PURPOSE_TRAIN and RECORD_FINAL, because media have no noisy steps")
    if not is_training:
        return "none"
    if not is_final and not noise.steps:
        raise ValueError(
            "noise: RECORD_STEPS needs sde_steps, and eta > 0 or recorded_steps, because an ODE has no log-prob to "
            "train on; or give RECORD_FINAL"
        )
    return "final" if is_final else "steps"


def _groups(
    messages: Sequence[rollout_pb2.PromptGroup], *, is_guided: bool, is_mixed: bool = False
) -> tuple[PromptGroup, ...]:
    groups = [_group(message, is_guided=is_guided) for message in messages]
    numbers = [group.group for group in groups]
    num_samples = sum(len(group.indices) for group in groups)
    if not groups or len(set(numbers)) != len(numbers):
        raise ValueError(f"groups: give at least one, each with its own number, not {numbers}")
    if num_samples > MAX_SAMPLES:
        raise ValueError(f"groups: {num_samples} samples are more than {MAX_SAMPLES} in one call: split it")
    if len({bool(message.media) for message in messages}) > 1:
        raise ValueError("groups: give media to all groups of a call or to none: split it")
    if not is_mixed and len({bool(message.images) for message in messages}) > 1:
        raise ValueError("groups: give images to all groups of a call or to none: split it")
    return tuple(sorted(groups, key=lambda group: group.group))


def _group(message: rollout_pb2.PromptGroup, *, is_guided: bool) -> PromptGroup:
    indices, seeds = list(message.indices), list(message.seeds)
    if not indices or len(indices) != len(seeds):
        raise ValueError(
            f"group {message.group}: give one seed an index and at least one index, not {len(seeds)} and {len(indices)}"
        )
    if len(set(indices)) != len(indices):
        raise ValueError(f"group {message.group}: indices repeat: {indices}")
    if len(message.images) > MAX_IMAGES:
        raise ValueError(f"group {message.group}: {len(message.images)} images are more than {MAX_IMAGES}")
    if message.media and len(message.media) != len(indices):
        raise ValueError(
            f"group {message.group}: give one of media an index, not {len(message.media)} and {len(indices)}"
        )
    check_bytes(f"group {message.group}: its prompt", len(message.prompt.encode()), MAX_PROMPT_BYTES)
    negative = message.negative_prompt if is_guided and message.HasField("negative_prompt") else None
    check_bytes(f"group {message.group}: its negative prompt", len((negative or "").encode()), MAX_PROMPT_BYTES)
    pairs = sorted(zip(indices, seeds, strict=True))
    ordered = tuple(index for index, _ in pairs), tuple(seed for _, seed in pairs)
    return PromptGroup(message.group, message.prompt, *ordered, message.initial_seed, negative_prompt=negative)


def _sampling(message: rollout_pb2.Sampling) -> Sampling:
    for name, side in (("height", message.height), ("width", message.width)):
        if not 0 < side <= MAX_SIDE:
            raise ValueError(f"sampling.{name} = {side}: give 1 to {MAX_SIDE} pixels")
    if not 0 < message.num_inference_steps <= MAX_STEPS:
        raise ValueError(f"sampling.num_inference_steps = {message.num_inference_steps}: give 1 to {MAX_STEPS}")
    guidance = message.guidance_scale
    if not (math.isfinite(guidance) and guidance >= 1):
        raise ValueError(f"sampling.guidance_scale = {guidance}: give a number of at least 1; 1 is off")
    check_bytes("sampling.negative_prompt", len(message.negative_prompt.encode()), MAX_PROMPT_BYTES)
    negative = message.negative_prompt if guidance > 1 else ""
    size = Size(message.height, message.width, message.num_frames or 1)
    if size.num_frames > MAX_FRAMES:
        raise ValueError(f"sampling.num_frames = {size.num_frames}: give 1 to {MAX_FRAMES}")
    return Sampling(
        size,
        message.num_inference_steps,
        Guidance(
            guidance,
            _number(message, "embedded_guidance", "a finite number of at least 0, or remove it", lambda it: it >= 0),
            _interval(message),
            _number(message, "image_guidance_scale", "a number of at least 1; 1 is off", lambda it: it >= 1) or 1.0,
            cast(Renorm, _one_of(get_args(Renorm), "guidance_renorm", message.guidance_renorm))
            if message.guidance_renorm
            else None,
        ),
        negative,
        message.condition_pixels or None,
        cast(SamplerName, _one_of(get_args(SamplerName), "sampler", message.sampler or "euler")),
        _number(message, "shift", "a finite number above 0, or remove it", lambda it: it > 0),
        message.full_precision,
        _number(message, "sound_share", "a number from 0 to 1, or remove it", lambda it: 0 <= it <= 1),
    )


def _one_of(known: Sequence[str], field: str, name: str) -> str:
    if name not in known:
        raise ValueError(f"sampling.{field} = {name!r}: give one of {', '.join(known)}")
    return name


def _number(message: Any, field: str, wanted: str, fits: Callable[[float], bool]) -> float | None:
    """A number that may be left out. Raises ValueError for one that is not `wanted`."""
    if not message.HasField(field):
        return None
    value: float = getattr(message, field)
    if not (math.isfinite(value) and fits(value)):
        raise ValueError(f"sampling.{field} = {value}: give {wanted}")
    return value


def _interval(message: rollout_pb2.Sampling) -> tuple[float, float]:
    low = message.guidance_low if message.HasField("guidance_low") else 0.0
    high = message.guidance_high if message.HasField("guidance_high") else 1.0
    if not 0 <= low < high <= 1:
        raise ValueError(
            f"sampling.guidance_low = {low}, sampling.guidance_high = {high}: give rising noise levels from 0 to 1"
        )
    return low, high


def _noise(message: rollout_pb2.Noise, num_steps: int) -> Noise:
    steps = tuple(message.sde_steps)
    if not (math.isfinite(message.eta) and message.eta >= 0):
        raise ValueError(f"noise.eta = {message.eta}: give a finite number of at least 0")
    if not steps or (message.eta == 0 and not message.recorded_steps):
        if message.tail_steps:
            raise ValueError(f"noise.tail_steps = {message.tail_steps} needs sde_steps and eta > 0: remove it")
        return Noise(share_initial=message.share_initial_noise)
    if message.step_type not in STEPS:
        raise ValueError(f"noise.step_type = {message.step_type!r}: give one of {', '.join(STEPS)}")
    if list(steps) != sorted(set(steps)) or steps[-1] >= num_steps:
        raise ValueError(f"noise.sde_steps = {list(steps)}: give ascending steps below {num_steps}, each once")
    recorded = tuple(message.recorded_steps)
    if list(recorded) != sorted(set(recorded)) or not set(recorded) <= set(steps):
        raise ValueError(f"noise.recorded_steps = {list(recorded)}: give ascending ones of sde_steps, each once")
    return Noise(message.step_type, message.eta, steps, message.share_initial_noise, message.tail_steps, recorded)
