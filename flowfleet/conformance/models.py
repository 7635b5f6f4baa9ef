"""Does a model family's adapter compute what diffusers' pipeline does, and can a trainer adapt, save and load it?

`check_model` is `flowfleet check-model`. Its parts hold the families' own tests as well: each takes an adapter of a
random tiny pipeline as well as of a real one, and raises AssertionError with what differs.
"""

import inspect
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from flowfleet import plugins
from flowfleet.algorithms.sde import ode_step, reverse_step
from flowfleet.conformance.report import Result, Status
from flowfleet.job.adapter_files import PEFT_FILE, find_adapter
from flowfleet.models.base import ModelAdapter, Schedule
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.registry import FAMILIES, ModelFamily, family_of
from flowfleet.models.sequences.adapter import SequenceAdapter, Tokens
from flowfleet.models.settings import NO_GUIDANCE, Guidance, Size
from flowfleet.models.trainable import adapter_writer, require_adapters, require_trainable
from flowfleet.models.weight_files import PIPELINE
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.weights.lora import adapter_from_bytes, adapter_to_bytes, install_lora, load_adapter, remove_lora

RAGGED: Final = ['A red sign that says "K7QX"', "a", "a green blue white sign that says nothing at all"]
SEEDS: Final = [11, 2**62, 5]
STEPS: Final = 3
TOLERANCE: Final = 1e-4
Encode = Callable[[list[str]], PromptEmbeds]
_SIDES: Final = (64, 128, 256)
_PICTURE: Final = Image.linear_gradient("L").convert("RGB")
_ROUND_TRIP: Final = "An adapter computes the same once it is saved and loaded"
_CLASSES: Final = "The transformer has blocks and takes an adapter, which the pipeline saves"


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in SEEDS]


@torch.no_grad()
def sample_ode(
    adapter: ModelAdapter,
    prompts: PromptEmbeds,
    size: Size,
    steps: int,
    guidance: Guidance = NO_GUIDANCE,
    negative: PromptEmbeds | None = None,
) -> Tensor:
    """Final latents of the prompts with SEEDS and eta 0."""
    schedule, latents = adapter.schedule(steps, size), adapter.initial_latents(SEEDS, size)
    for i in range(steps):
        velocity = adapter.velocity(
            latents, schedule.timesteps[i], prompts, size=size, guidance=guidance, negative=negative
        )
        latents = ode_step(latents, velocity, schedule.sigmas[i], schedule.sigmas[i + 1])
    return latents


def check_model(place: str) -> Iterator[Result]:
    """Yields a result per check of a folder's model, on the CPU in float32; of a plugin's package or a pipeline class,
    of its classes alone. Raises ValueError for what is neither."""
    plugins.load()
    named = [f for f in FAMILIES.values() if place in (f.pipeline, f.adapter.partition(":")[0].partition(".")[0])]
    if named and not Path(place).is_dir():
        for family in named:
            yield from _checked(family.title, _CLASSES, partial(_require_classes, family))
        return
    folder = Path(place)
    family = family_of(folder)
    files = partial(family.check_files, folder)
    if (yield from _checked("files", "The folder's files are whole", files)):
        return
    if family.writes_tokens:
        yield from _check_text(family.load().load(folder, dtype=torch.float32), folder)
        return
    adapter: ModelAdapter = family.load().load(folder, dtype=torch.float32)
    size, pipeline = _smallest(adapter, family), None
    if family.takes_images and family.modality == "image":
        adapter.resize_conditions(_SIDES[0] ** 2)
    adapter.size_conditions(size)
    encode = partial(_encoded, adapter, takes_images=family.takes_images > 0 and not family.holds_first_frame)
    own = adapter.layout != PIPELINE or (_needs_images(family) and not _takes_size(adapter.pipeline_class))
    checks: dict[str, tuple[str, Callable[[], object]]] = {
        "classes": (
            _CLASSES,
            partial(require_trainable, adapter.experts, None if own else adapter.pipeline_class, lora=True),
        ),
        "rows": ("A row does not depend on its batch", partial(assert_rows_are_alone, adapter, encode, size)),
        "ratio": (
            "A trainer's log-probs are the rollout's, bit for bit",
            partial(assert_ratio_is_one, adapter, encode, size),
        ),
    }
    if not own:
        kind: Any = adapter.pipeline_class
        pipeline = kind.from_pretrained(str(folder), local_files_only=True, **dict.fromkeys(adapter.own_parts))
        adapter.complete(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        checks["parity"] = ("Samples are the pipeline's", partial(assert_parity, adapter, pipeline, family, size))
    velocity = partial(adapter.velocity, adapter.initial_latents(SEEDS, size), torch.tensor(500.0), size=size)
    checks["lora"] = (_ROUND_TRIP, partial(_round_trip, adapter, lambda: velocity(encode(RAGGED))))
    if pipeline is not None:
        again = partial(_reloaded, adapter, pipeline, family, size)
        checks["reload"] = ("The pipeline loads what a job exports, and samples the same", again)
    for name, (rule, check) in checks.items():
        yield from _checked(name, rule, check)
    if pipeline is None:
        rule = "Samples are the pipeline's"
        yield Result(name="parity", rule=rule, status=Status.SKIP, detail="no pipeline to compare with", seconds=0)


def _check_text(adapter: SequenceAdapter, folder: Path) -> Iterator[Result]:
    written = [Tokens(adapter.encode(text), torch.tensor([1, row, 1])) for row, text in enumerate(RAGGED)]
    compare = partial(_assert_transformers, adapter, folder, written)
    log_probs = partial(adapter.log_probs, written, temperature=1.0)
    yield from _checked("log-probs", "Log-probs of sequences in one row are transformers'", compare)
    yield from _checked("lora", _ROUND_TRIP, partial(_round_trip, adapter, log_probs))
    rule = "transformers loads what a job exports, and computes the same"
    yield from _checked("reload", rule, partial(_reloaded_text, adapter, compare))


@torch.no_grad()
def _assert_transformers(adapter: SequenceAdapter, folder: Path, written: list[Tokens], export: str = "") -> None:
    model, expected = adapter.model_class.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True), []
    if export:
        model.load_adapter(export)
    for one in written:
        logits = model(input_ids=torch.cat([one.prompt.token_ids, one.token_ids[:-1]])[None]).logits[0]
        given = logits[-len(one.token_ids) :].log_softmax(-1)
        expected.append(given.gather(1, one.token_ids[:, None])[:, 0])
    _assert_close(adapter.log_probs(written, temperature=1.0), torch.cat(expected), "log-probs and transformers'")


def _reloaded_text(adapter: SequenceAdapter, compare: Callable[[str], None]) -> None:
    layers = {f"base_model.model.{name.partition('.')[2]}": one for name, one in _adapted(adapter).items()}
    with tempfile.TemporaryDirectory(prefix="flowfleet-") as folder:
        LoraConfig(r=2, lora_alpha=4, target_modules=list(adapter.lora_targets)).save_pretrained(folder)
        save_file(layers, Path(folder, PEFT_FILE), metadata={"format": "pt"})
        compare(folder)


def _require_classes(family: ModelFamily) -> None:
    adapter = family.load()
    if adapter.layout != PIPELINE:
        return
    given = inspect.signature(adapter.pipeline_class.__init__).parameters["transformer"].annotation
    require_adapters(given, adapter.pipeline_class)
    assert getattr(given, "_no_split_modules", None), f"{given.__name__} has no _no_split_modules"


def assert_rows_are_alone(adapter: ModelAdapter, encode: Encode, size: Size) -> None:
    prompts, latents = encode(RAGGED), adapter.initial_latents(SEEDS, size)
    with torch.no_grad():
        together = adapter.velocity(latents, torch.tensor(500.0), prompts, size=size)
        for row, prompt in enumerate(RAGGED):
            alone = adapter.velocity(latents[row : row + 1], torch.tensor(500.0), encode([prompt]), size=size)
            _assert_close(alone[0], together[row], f"the velocity of prompt {row} alone and in a batch")
    assert torch.equal(adapter.initial_latents(SEEDS[1:2], size)[0], latents[1]), "initial latents depend on the batch"


def assert_ratio_is_one(adapter: ModelAdapter, encode: Encode, size: Size, step: str = "sde") -> None:
    """Rollout without gradients and with noise, trainer with gradients and stored samples."""
    schedule, prompts = adapter.schedule(6, size), encode(RAGGED)
    latents, sigmas = adapter.initial_latents(SEEDS, size), schedule.sigmas[1:3]
    noise = adapter.step_noise(SEEDS, 1, latents.shape[1:])

    def log_prob(**sample: Tensor) -> Any:
        velocity = adapter.velocity(latents, schedule.timesteps[1], prompts, size=size)
        return reverse_step(step)(latents, velocity, *sigmas, eta=0.7, sigma_max=schedule.sigma_max, **sample)

    with torch.no_grad():
        rollout = log_prob(noise=noise)
    experts = list(adapter.experts.values())
    try:
        for expert in experts:
            expert.requires_grad_(True)
        trained = log_prob(prev_sample=rollout.prev_sample).log_prob
        assert torch.equal(trained.detach(), rollout.log_prob), "log-probs differ with and without gradients"
        trained.sum().backward()
        reached = [parameter.grad is not None for expert in experts for parameter in expert.parameters()]
        assert sum(reached) > len(reached) / 2 / len(experts), "gradients reach less than half of the parameters"
    finally:
        for expert in experts:
            expert.requires_grad_(False).zero_grad()


def assert_parity(adapter: ModelAdapter, pipeline: Any, family: ModelFamily, size: Size) -> None:
    """Latents of the adapter and of diffusers' pipeline, which gets its prompts one by one, without guidance."""
    parameters = inspect.signature(pipeline.__call__).parameters
    given: dict[str, Any] = {"height": size.height, "width": size.width, "num_frames": size.num_frames}
    given |= {"num_inference_steps": STEPS, "output_type": "latent", "true_cfg_scale": 1.0}
    given |= {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "audio_guidance_scale": 1.0}
    given |= {"audio_stg_scale": 0.0, "audio_modality_scale": 1.0, "audio_guidance_rescale": 0.0}
    given |= {"max_area": size.height * size.width, "use_resolution_binning": False}
    kept: dict[str, Tensor] = {}  # latents as they are denoised: few pipelines give them back in another layout

    def keep(_: object, step: int, timestep: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return kept.update(tensors) or {}

    given["callback_on_step_end"] = keep
    if not family.embedded_guidance:
        given["guidance_scale"] = 1.0 if "do_classifier_free_guidance" not in dir(pipeline) else _unguided(pipeline)
    if _needs_images(family):
        given["image"] = _PICTURE
    if hasattr(pipeline, "guider"):
        pipeline.guider.disable()
    hands_levels = family.modality == "image" or "sigmas" in parameters  # else the scheduler shifts twice
    if not (hands_levels and isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler)):
        pipeline.scheduler = first_order(adapter.schedule(STEPS, size))
    given, rows = {name: value for name, value in given.items() if name in parameters}, []
    for prompt, generator in zip(RAGGED, generators(), strict=True):
        made = pipeline(prompt=[prompt], generator=[generator], **given)
        rows.append(kept["latents"] if kept else made.frames if hasattr(made, "frames") else made.images)
    expected = torch.cat(rows)
    prompts = _encoded(adapter, RAGGED, takes_images=_needs_images(family))
    found = sample_ode(adapter, prompts, size, STEPS)
    if lengths := adapter.part_lengths(size):  # while it denoises the pipeline hands out the picture's latents alone
        found, expected = found[:, : lengths[0]], expected.flatten(1)
    assert found.shape == expected.shape, f"latents are {(*found.shape,)}, the pipeline's {(*expected.shape,)}"
    _assert_close(found, expected.float(), "latents of the adapter and the pipeline")


def first_order(schedule: Schedule) -> Any:
    """A scheduler of first-order steps, for a pipeline whose own has no density to learn from."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    own, levels = scheduler.set_timesteps, schedule.sigmas[:-1].tolist()
    scheduler.set_timesteps = lambda *_, **__: own(sigmas=levels)
    return scheduler


def _encoded(adapter: ModelAdapter, texts: list[str], *, takes_images: bool) -> PromptEmbeds:
    return adapter.encode(texts, images=[[_PICTURE]] * len(texts) if takes_images else None)


def _needs_images(family: ModelFamily) -> bool:
    return family.takes_images > 0 and not family.images_optional


def _takes_size(pipeline_class: Any) -> bool:
    """True for a pipeline of videos of a given size from images, which all its prompts share."""
    return {"image", "height", "num_frames"} <= inspect.signature(pipeline_class.__call__).parameters.keys()


def _unguided(pipeline: Any) -> float:
    """The greatest of 1 and 0 that switches the pipeline's guidance off."""
    pipeline._guidance_scale = pipeline._audio_guidance_scale = 1.0
    return 0.0 if pipeline.do_classifier_free_guidance else 1.0


def _adapted(adapter: ModelAdapter | SequenceAdapter) -> dict[str, Tensor]:
    """Installs an adapter that changes the model; returns its tensors by published name."""
    targets = list(adapter.lora_targets)
    parameters = install_lora(adapter.experts, LoraSpec(rank=2, alpha=4, target_modules=targets), seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in parameters.items():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.05, generator=generator)
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@torch.no_grad()
def _round_trip(adapter: ModelAdapter | SequenceAdapter, compute: Callable[[], Tensor]) -> None:
    plain, state = compute(), _adapted(adapter)
    adapted = compute()
    remove_lora(adapter.experts)
    assert torch.equal(compute(), plain), "the model is another one after its adapter was removed"
    assert not torch.equal(adapted, plain), "the adapter changes nothing"
    install_lora(adapter.experts, LoraSpec(rank=2, alpha=4, target_modules=list(adapter.lora_targets)))
    load_adapter(adapter.experts, adapter_from_bytes(adapter_to_bytes(state)))
    same = torch.equal(compute(), adapted)
    remove_lora(adapter.experts)
    assert same, "a loaded adapter computes something else"


@torch.no_grad()
def _reloaded(adapter: ModelAdapter, pipeline: Any, family: ModelFamily, size: Size) -> None:
    """Writes the adapter of the first transformer as a job's export does, and loads it into the pipeline."""
    state, name = _adapted(adapter), next(iter(adapter.experts))
    layers = {key.partition(".")[2]: tensor for key, tensor in state.items() if key.startswith(f"{name}.")}
    config = {"r": 2, "lora_alpha": 4, "target_modules": list(adapter.lora_targets)}
    try:
        with tempfile.TemporaryDirectory(prefix="flowfleet-") as folder:
            adapter_writer(adapter.pipeline_class)(
                folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=config
            )
            find_adapter(Path(folder))
            if hasattr(pipeline, "load_lora_weights"):
                pipeline.load_lora_weights(folder)
            else:
                getattr(pipeline, name).load_lora_adapter(folder, prefix="transformer", use_safetensors=True)
        if len(adapter.experts) == 1:
            assert_parity(adapter, pipeline, family, size)
    finally:
        remove_lora(adapter.experts)


def _smallest(adapter: ModelAdapter, family: ModelFamily) -> Size:
    frames = 1 + family.frame_multiple if family.modality == "video" else 1
    for side in _SIDES:
        try:
            adapter.latent_shape(Size(side, side, frames))
        except ValueError as error:
            refused = error
        else:
            return Size(side, side, frames)
    raise ValueError(f"the adapter draws none of {', '.join(map(str, _SIDES))} pixels a side: {refused}")


def _assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    gap = float((found.float() - expected.float()).abs().max())
    assert gap <= TOLERANCE, f"{what} differ by {gap:.2g}, more than {TOLERANCE:g}"


def _checked(name: str, rule: str, check: Callable[[], object]) -> Generator[Result, None, str]:
    """Yields the check's result; returns what it failed by."""
    began, failure = time.monotonic(), ""
    try:
        check()
    except Exception as error:  # an adapter of others may raise anything
        failure = str(error) or type(error).__name__
    status = Status.FAIL if failure else Status.PASS
    yield Result(name=name, rule=rule, status=status, detail=failure, seconds=time.monotonic() - began)
    return failure
