"""The Wan adapter against diffusers' own `WanPipeline`: one transformer, two experts, a timestep a token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.algorithms.sde import StepResult, reverse_step
from flowfleet.conformance.models import SEEDS, generators, sample_ode
from flowfleet.models.embeds import PromptEmbeds, concat_embeds
from flowfleet.models.families.wan import WanAdapter
from flowfleet.models.schedules import euler_schedule
from flowfleet.models.settings import Guidance, Size
from tests.tiny_models import make_tiny
from tests.tiny_models.wan import BOUNDARY_RATIO

RAGGED = ["a red ball moving left", "  the &lt;b&gt;  square\n  on a video ", "up"]
SHIFT = {"wan": 3.0, "wan_two_experts": 5.0, "wan_5b": 5.0}
"""What `tests.tiny_models.wan` writes, for the first as a UniPC scheduler's flow_shift."""
SIZES = {"wan": Size(32, 48, 5), "wan_two_experts": Size(48, 32, 5), "wan_5b": Size(32, 64, 5)}
LATENTS = {"wan": (16, 2, 4, 6), "wan_two_experts": (16, 2, 6, 4), "wan_5b": (48, 2, 2, 4)}
every_kind = pytest.mark.parametrize("kind", SHIFT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_tiny(kind, tmp_path_factory.mktemp("models") / kind) for kind in SHIFT}


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path]) -> dict[str, WanAdapter]:
    return {kind: WanAdapter.load(folder, dtype=torch.float32) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def pipelines(folders: dict[str, Path]) -> dict[str, Any]:
    """Pipelines with first-order schedulers of the checkpoints' shifts, which are handed Wan's levels."""
    return {kind: load_pipeline(folder, SHIFT[kind]) for kind, folder in folders.items()}


def levels_of(steps: int, shift: float) -> np.ndarray:
    """The formula in float64: linspace(1, 1/N, N), shifted once, and 0."""
    u = np.linspace(1, 1 / steps, steps)
    return np.append(shift * u / (1 + (shift - 1) * u), 0.0)


def load_pipeline(folder: Path, shift: float) -> Any:
    pipeline: Any = WanPipeline.from_pretrained(str(folder))
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    own: Any = pipeline.scheduler.set_timesteps

    def set_timesteps(steps: int, device: Any = None) -> None:
        """`WanPipeline` names no levels, and the scheduler's own would be shifted twice."""
        own(sigmas=np.linspace(1, 1 / steps, steps), device=device)

    pipeline.scheduler.set_timesteps = set_timesteps
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def arguments_of(size: Size, steps: int, scale: float) -> dict[str, Any]:
    return {
        "height": size.height,
        "width": size.width,
        "num_frames": size.num_frames,
        "num_inference_steps": steps,
        "guidance_scale": scale,
        "negative_prompt": ["black video"] * len(RAGGED) if scale > 1 else None,
    }


@pytest.mark.parametrize("scale", [1.0, 4.0])
@every_kind
def test_sampling_equals_the_pipeline(
    adapters: dict[str, WanAdapter], pipelines: dict[str, Any], kind: str, scale: float
) -> None:
    adapter, pipeline, size = adapters[kind], pipelines[kind], SIZES[kind]
    arguments = arguments_of(size, 3, scale)
    expected = pipeline(RAGGED, generator=generators(), output_type="latent", **arguments).frames
    assert expected.shape == (len(RAGGED), *LATENTS[kind])
    negative = adapter.encode(["black video"])
    latents = sample_ode(adapter, adapter.encode(RAGGED), size, 3, Guidance(scale), negative)
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert (latents - adapter.initial_latents(SEEDS, size)).abs().mean() > 0.1  # the model had a say


@every_kind
def test_decoding_equals_the_pipelines_frames(
    adapters: dict[str, WanAdapter], pipelines: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, pipeline, size = adapters[kind], pipelines[kind], SIZES[kind]
    latents = adapter.initial_latents(SEEDS, size)
    no_steps = arguments_of(size, 1, 1.0)
    pipeline.scheduler.step, step = lambda output, t, sample, **_: (sample,), pipeline.scheduler.step
    videos = pipeline(RAGGED, latents=latents, output_type="np", **no_steps).frames
    pipeline.scheduler.step = step
    frames = adapter.decode(latents, size)
    assert frames.shape == (3, 5, size.height, size.width, 3) == videos.shape
    assert frames.dtype == torch.uint8
    levels = np.abs(frames.numpy().astype(int) - (videos * 255).round().astype(int))
    assert levels.max() <= 1
    assert (levels > 0).mean() < 1e-3  # where a value lies on the edge between two levels
    monkeypatch.setattr("flowfleet.models.video_vae.CHUNK_PIXELS", 1)
    alone = (adapter.decode(latents, size).int() - frames.int()).abs()
    assert alone.max() <= 1
    assert (alone > 0).float().mean() < 1e-3


@every_kind
def test_media_are_encoded_as_the_pipelines_normalization_inverted(
    adapters: dict[str, WanAdapter], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, size = adapters[kind], SIZES[kind]
    frames = torch.randint(0, 256, (2, 5, size.height, size.width, 3), dtype=torch.uint8)
    latents = adapter.encode_media(frames, size)
    assert latents.shape == (2, *adapter.latent_shape(size))
    assert latents.dtype == torch.float32
    config = adapter.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        posterior = adapter.vae.encode(frames.permute(0, 4, 1, 2, 3) / 127.5 - 1).latent_dist
    torch.testing.assert_close(latents / (1 / std) + mean, posterior.mode(), rtol=0, atol=1e-5)
    monkeypatch.setattr("flowfleet.models.video_vae.CHUNK_PIXELS", 1)
    torch.testing.assert_close(adapter.encode_media(frames, size), latents, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="media must be uint8"):
        adapter.encode_media(frames[:, :4], size)
    with pytest.raises(ValueError, match="num_frames"):
        adapter.encode_media(frames[:, :4], Size(size.height, size.width, 4))


@every_kind
@pytest.mark.parametrize("steps", [1, 4, 20])
def test_schedule_and_experts_are_the_pipelines_bit_for_bit(
    adapters: dict[str, WanAdapter], pipelines: dict[str, Any], kind: str, steps: int
) -> None:
    adapter, pipeline, size = adapters[kind], pipelines[kind], SIZES[kind]
    called: list[tuple[str, Tensor]] = []

    def record(name: str) -> Callable[..., tuple[Tensor]]:
        def forward(hidden_states: Tensor, timestep: Tensor, **_: Any) -> tuple[Tensor]:
            called.append((name, timestep))
            return (hidden_states,)

        return forward

    experts = {name: getattr(pipeline, name) for name in adapter.experts}
    before = {name: module.forward for name, module in experts.items()}
    for name, module in experts.items():
        module.forward = record(name)
    pipeline("a", output_type="latent", **arguments_of(size, steps, 1.0))
    for name, module in experts.items():
        module.forward = before[name]
    schedule = adapter.schedule(steps, size)
    assert torch.equal(schedule.sigmas, pipeline.scheduler.sigmas)
    assert torch.equal(schedule.timesteps, torch.stack([torch.unique(timestep).squeeze() for _, timestep in called]))
    chosen = [adapter.expert(timestep[None]) for timestep in schedule.timesteps]
    assert chosen == [adapter.experts[name] for name, _ in called]


def test_two_experts_share_the_work_at_the_boundary(adapters: dict[str, WanAdapter]) -> None:
    adapter = adapters["wan_two_experts"]
    high, low = adapter.experts.values()
    assert list(adapter.experts) == ["transformer", "transformer_2"]
    assert adapter.boundary == BOUNDARY_RATIO
    boundary = torch.tensor([1000 * BOUNDARY_RATIO])
    assert adapter.expert(boundary) is high
    assert adapter.expert(torch.nextafter(boundary, torch.zeros(1))) is low
    size, prompts = SIZES["wan_two_experts"], adapter.encode(["a", "a"])
    with pytest.raises(ValueError, match="one side of the experts' boundary"):
        adapter.velocity(adapter.initial_latents([1, 2], size), torch.tensor([900.0, 100.0]), prompts, size=size)


def test_a_forward_asks_its_device_for_no_value(folders: dict[str, Path]) -> None:
    """On the device `meta`, whose tensors have none: neither for the expert nor for the padding."""
    adapter, size = WanAdapter.load(folders["wan_two_experts"], dtype=torch.float32), SIZES["wan_two_experts"]
    prompts, negative = adapter.encode(RAGGED[:2]).to("meta"), adapter.encode([" "]).to("meta")
    latents = adapter.initial_latents([1, 2], size).to("meta")
    served: list[Any] = []
    for expert in adapter.experts.values():
        expert.to("meta").register_forward_pre_hook(lambda module, _: served.append(module))
    for timestep, serving in zip((900.0, 100.0), adapter.experts.values(), strict=True):
        arguments: dict[str, Any] = {"size": size, "guidance": Guidance(3.0), "negative": negative}
        velocity = adapter.velocity(latents, torch.tensor(timestep), prompts, **arguments)
        assert velocity.shape == latents.shape
        assert served == [serving] * 2
        served.clear()
    both = concat_embeds([prompts, negative])
    assert both.has_padding
    assert not concat_embeds([negative, negative]).select([1]).has_padding


def test_a_boundary_without_a_second_expert_is_idle(folders: dict[str, Path], tmp_path: Path) -> None:
    pipeline = load_pipeline(folders["wan_two_experts"], 5.0)
    pipeline.register_modules(transformer_2=None)
    pipeline.save_pretrained(tmp_path / "one")
    adapter = WanAdapter.load(tmp_path / "one", dtype=torch.float32)
    assert list(adapter.experts) == ["transformer"]
    assert adapter.expert(torch.tensor([100.0])) is adapter.transformer


def test_an_index_that_knows_no_second_transformer_loads(folders: dict[str, Path], tmp_path: Path) -> None:
    """Diffusers releases older than Wan 2.2 write such an index."""
    folder = shutil.copytree(folders["wan"], tmp_path / "old")
    index = json.loads((folder / "model_index.json").read_text())
    for name in ("transformer_2", "boundary_ratio", "expand_timesteps"):
        del index[name]
    (folder / "model_index.json").write_text(json.dumps(index))
    for components in (("transformer",), ("text_encoder", "vae")):
        adapter = WanAdapter.load(folder, dtype=torch.float32, components=components)
        assert list(adapter.experts) == [name for name in components if name == "transformer"]


def test_encoding_equals_the_pipelines(adapters: dict[str, WanAdapter], pipelines: dict[str, Any]) -> None:
    adapter, pipeline = adapters["wan"], pipelines["wan"]
    prompts = [*RAGGED, "", "red " * 600]
    encoded = adapter.encode(prompts)
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)
    assert torch.equal(encoded.embeds, expected)
    assert torch.equal(encoded.mask, expected.abs().sum(-1) > 0)
    assert encoded.mask.sum(1).tolist()[3:] == [1, 512]
    short = adapter.encode(RAGGED)
    assert short.embeds.shape[1] == int(encoded.mask[:3].sum(1).max()) < 512
    assert torch.equal(short.embeds, expected[:3, : short.embeds.shape[1]])


def test_padding_to_a_width_changes_nothing(adapters: dict[str, WanAdapter]) -> None:
    adapter, size = adapters["wan"], SIZES["wan"]
    tight, latents = adapter.encode(RAGGED), adapter.initial_latents(SEEDS, size)
    wide = concat_embeds([tight, adapter.encode(["red " * 40])]).select([0, 1, 2])
    assert wide.embeds.shape[1] > tight.embeds.shape[1]
    with torch.no_grad():
        velocities = [adapter.velocity(latents, torch.tensor(500.0), prompts, size=size) for prompts in (tight, wide)]
    assert torch.equal(*velocities)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@every_kind
def test_the_trainers_ratio_is_exactly_one_and_gradients_flow(
    adapters: dict[str, WanAdapter], kind: str, scale: float
) -> None:
    """Rollout without gradients and noise, trainer with gradients and stored samples: the same log-probs in bits."""
    adapter, size = adapters[kind], SIZES[kind]
    schedule, prompts, negative = adapter.schedule(4, size), adapter.encode(RAGGED), adapter.encode([""])

    def step(latents: Tensor, i: int, **how: Tensor) -> StepResult:
        velocity = adapter.velocity(
            latents, schedule.timesteps[i], prompts, size=size, guidance=Guidance(scale), negative=negative
        )
        sigmas = schedule.sigmas[i : i + 2]
        return reverse_step("sde")(latents, velocity, *sigmas, eta=0.7, sigma_max=schedule.sigma_max, **how)

    latents = adapter.initial_latents(SEEDS, size)
    stored = []
    for i in range(3):
        with torch.no_grad():
            result = step(latents, i, noise=adapter.step_noise(SEEDS, i, latents.shape[1:]))
        stored.append((latents, result))
        latents = result.prev_sample
    for module in adapter.experts.values():
        module.requires_grad_(True)
    for i, (latents, rollout) in enumerate(stored):
        trainer = step(latents, i, prev_sample=rollout.prev_sample)
        assert torch.equal((trainer.log_prob - rollout.log_prob).exp().detach(), torch.ones(len(SEEDS)))
        trainer.log_prob.sum().backward()  # type: ignore[no-untyped-call]
    for module in adapter.experts.values():  # the schedule's first steps reach both
        gradients = [parameter.grad for parameter in module.parameters()]
        assert sum(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients) > (
            len(gradients) / 2
        )
        module.requires_grad_(False).zero_grad()


def test_prompts_make_a_difference(adapters: dict[str, WanAdapter]) -> None:
    for kind, adapter in adapters.items():
        latents = adapter.initial_latents(SEEDS[:1] * 3, SIZES[kind])
        with torch.no_grad():
            velocity = adapter.velocity(latents, torch.tensor(900.0), adapter.encode(RAGGED), size=SIZES[kind])
        floor = 1e-2 * velocity.std()
        assert all((velocity[i] - velocity[i - 1]).abs().mean() > floor for i in range(3))


def test_timesteps_may_differ_by_row(adapters: dict[str, WanAdapter]) -> None:
    for kind in ("wan", "wan_5b"):
        adapter, size = adapters[kind], SIZES[kind]
        prompts, latents = adapter.encode(RAGGED), adapter.initial_latents(SEEDS, size)
        timesteps = torch.tensor([100.0, 900.0, 400.0])
        with torch.no_grad():
            together = adapter.velocity(latents, timesteps, prompts, size=size)
            for row, timestep in enumerate(timesteps):
                alone = adapter.velocity(latents, timestep, prompts, size=size)[row]
                torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-6)


FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@pytest.mark.parametrize("steps", [1, 10, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
def test_levels_are_shifted_once_whatever_the_scheduler(steps: int, shift: float) -> None:
    euler, unipc = FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
    schedule = euler_schedule(unipc(flow_shift=shift, **FLOW).config, steps)
    np.testing.assert_allclose(schedule.sigmas, levels_of(steps, shift), rtol=1e-6)
    assert torch.equal(schedule.timesteps, 1000 * schedule.sigmas[:-1])
    for config, own in ((euler(shift=shift).config, None), (unipc(flow_shift=7.0, **FLOW).config, shift)):
        same = euler_schedule(config, steps, own)
        assert torch.equal(same.sigmas, schedule.sigmas)
        assert torch.equal(same.timesteps, schedule.timesteps)


@pytest.mark.parametrize("steps", [10, 40])
def test_levels_are_those_of_the_checkpoints_own_solver(steps: int) -> None:
    """UniPC starts a little below 1 and takes its levels from a grid of a thousand."""
    unipc = UniPCMultistepScheduler(flow_shift=5.0, **FLOW)
    unipc.set_timesteps(steps)
    schedule = euler_schedule(unipc.config, steps)
    np.testing.assert_allclose(schedule.sigmas, unipc.sigmas, rtol=0, atol=5e-3)
    if steps == 10:  # the last ones, that were .594 .395 .024 when shifted twice
        assert schedule.sigmas[-4:].tolist() == pytest.approx([0.6818, 0.5556, 0.3571, 0], abs=1e-4)


def test_half_of_ten_steps_are_the_high_noise_experts(adapters: dict[str, WanAdapter]) -> None:
    """A14B's boundary, 0.875, and a shift of 5."""
    adapter = adapters["wan_two_experts"]
    schedule = adapter.schedule(10, SIZES["wan_two_experts"])
    assert [adapter.expert(timestep) is adapter.transformer for timestep in schedule.timesteps] == [True] * 5 + [
        False
    ] * 5


def test_schedulers_that_are_no_flow_are_refused() -> None:
    euler, unipc = FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
    with pytest.raises(ValueError, match="one shift for all sizes"):
        euler_schedule(euler(use_dynamic_shifting=True).config, 10)
    with pytest.raises(ValueError, match="is of no flow"):
        euler_schedule(unipc(flow_shift=8.0).config, 10)
    with pytest.raises(ValueError, match="at least 1"):
        euler_schedule(euler().config, 0)


def test_a_trainer_loads_the_transformers_alone(folders: dict[str, Path]) -> None:
    trainer = WanAdapter.load(folders["wan_two_experts"], dtype=torch.bfloat16, components=("transformer",))
    size = SIZES["wan_two_experts"]
    assert trainer.text_encoder is None
    assert trainer.vae is None
    assert len(trainer.experts) == 2
    assert not any(parameter.requires_grad for module in trainer.experts.values() for parameter in module.parameters())
    assert trainer.schedule(4, size).num_steps == 4
    latents = trainer.initial_latents([1], size)
    prompts = PromptEmbeds(torch.randn(1, 4, 32).bfloat16(), torch.ones(1, 4, dtype=torch.bool))
    for timestep in (950.0, 100.0):
        velocity = trainer.velocity(latents, torch.tensor(timestep), prompts, size=size)
        assert velocity.dtype == torch.float32
        assert velocity.shape == latents.shape
    with pytest.raises(ValueError, match="component vae"):
        trainer.decode(latents, size)
    with pytest.raises(ValueError, match="component text_encoder"):
        trainer.encode(["a"])


def test_everything_runs_in_bfloat16(folders: dict[str, Path]) -> None:
    adapter, size = WanAdapter.load(folders["wan_two_experts"], dtype=torch.bfloat16), SIZES["wan_two_experts"]
    prompts = adapter.encode(RAGGED)
    assert prompts.embeds.dtype == torch.bfloat16
    latents = sample_ode(adapter, prompts, size, 3)
    assert latents.dtype == torch.float32
    assert latents.isfinite().all()
    frames = adapter.decode(latents, size)
    assert adapter.encode_media(frames, size).dtype == torch.float32


def test_the_vae_keeps_the_checkpoints_precision(folders: dict[str, Path], adapters: dict[str, WanAdapter]) -> None:
    """Its weights are the file's, not rounded on the way; other parts are in the dtype that was asked for."""
    adapter, size = WanAdapter.load(folders["wan"], dtype=torch.bfloat16), SIZES["wan"]
    stored = load_file(folders["wan"] / "vae" / "diffusion_pytorch_model.safetensors")
    for name, tensor in adapter.vae.state_dict().items():
        torch.testing.assert_close(tensor, stored[name], rtol=0, atol=0)
    for module in (adapter.transformer, adapter.text_encoder):
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    latents = adapter.initial_latents([1, 2], size)
    assert torch.equal(adapter.decode(latents, size), adapters["wan"].decode(latents, size))


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("wan", Size(24, 32, 5), "multiples of 16"),
        ("wan", Size(32, 0, 5), "multiples of 16"),
        ("wan_5b", Size(48, 64, 5), "multiples of 32"),
        ("wan", Size(32, 32, 4), "multiple of 4 .1, 5, 9, 81, …., but it is 4"),
        ("wan_5b", Size(32, 32, 0), "num_frames"),
        ("wan", Size(32, 32, -3), "num_frames"),
    ],
)
def test_sizes_that_cannot_be_drawn_are_refused(
    adapters: dict[str, WanAdapter], kind: str, size: Size, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        adapters[kind].initial_latents([1], size)


def test_one_frame_is_a_picture(adapters: dict[str, WanAdapter]) -> None:
    adapter, size = adapters["wan"], Size(32, 32)
    latents = adapter.initial_latents([1], size)
    assert latents.shape == (1, 16, 1, 4, 4)
    assert adapter.decode(latents, size).shape == (1, 1, 32, 32, 3)


def test_lora_targets_name_modules_of_every_block(adapters: dict[str, WanAdapter]) -> None:
    transformer = adapters["wan"].transformer
    names = [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]
    found = {target: sum(name.endswith(f".{target}") for name in names) for target in WanAdapter.lora_targets}
    blocks = len(transformer.blocks)
    attentions = dict.fromkeys(("to_q", "to_k", "to_v", "to_out.0"), 2 * blocks)
    assert found == attentions | {"ffn.net.0.proj": blocks, "ffn.net.2": blocks}


def test_condition_images_are_refused(adapters: dict[str, WanAdapter]) -> None:
    with pytest.raises(ValueError, match="takes no condition images"):
        adapters["wan"].encode(["a"], images=[[Image.new("RGB", (8, 8))]])
