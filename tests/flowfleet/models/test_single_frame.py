"""The single-frame decoder against the VAE's own decoder on one frame."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage

from flowfleet.models.single_frame import SingleFrameDecoder


def make_vae(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1} | changes
    vae = AutoencoderKLQwenImage(**config)
    for name, parameter in vae.named_parameters():  # gains other than 1, so that one left out would show
        if name.endswith("gamma"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return vae.eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_res_blocks": 2, "z_dim": 16},
        {"temperal_downsample": [True, False, True]},
        {"dim_mult": [1, 2, 4], "temperal_downsample": [False, True]},
    ],
)
@torch.no_grad()
def test_it_equals_the_vae_on_one_frame(changes: dict[str, Any]) -> None:
    vae = make_vae(**changes).double()
    latents = torch.randn(3, vae.config.z_dim, 6, 10, dtype=torch.float64)
    expected = vae.decode(latents.unsqueeze(2), return_dict=False)[0][:, :, 0]
    assert expected.std() > 0.05
    torch.testing.assert_close(SingleFrameDecoder(vae)(latents), expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_float32_differs_by_rounding_only_and_clamps_alike() -> None:
    vae = make_vae()
    latents = 30 * torch.randn(2, 4, 8, 8)
    expected = vae.decode(latents.unsqueeze(2), return_dict=False)[0][:, :, 0]
    decoded = SingleFrameDecoder(vae)(latents)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-4)
    assert decoded.abs().max() <= 1


@torch.no_grad()
def test_bfloat16_stays_bfloat16_and_near_float32() -> None:
    vae = make_vae()
    latents = torch.randn(1, 4, 8, 8)
    exact = SingleFrameDecoder(vae)(latents)
    half = SingleFrameDecoder(vae.to(torch.bfloat16))(latents.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().mean() < 0.02


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@torch.no_grad()
def test_it_decodes_the_same_once_compiled(dtype: torch.dtype, near: float) -> None:
    torch._dynamo.reset()
    vae = make_vae().to(dtype)
    plain, compiled = SingleFrameDecoder(vae), SingleFrameDecoder(vae)
    compiled.compile_activations()
    for batch in (2, 1):  # the last chunk of a batch is smaller
        latents = torch.randn(batch, 4, 8, 8).to(dtype)
        torch.testing.assert_close(compiled(latents), plain(latents), rtol=0, atol=near)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1


def test_it_is_frozen_and_without_the_unused_time_slices() -> None:
    vae = make_vae()
    decoder = SingleFrameDecoder(vae)
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    assert num_parameters < 0.5 * sum(parameter.numel() for parameter in vae.decoder.parameters())
