"""An exact decoder of single images from the Qwen-Image VAE, which is a causal video VAE.

With one frame, a causal convolution pads two frames of zeros before it, so only the last time slice of its kernel meets
data, and the first chunk skips the time convolutions of the upsamplers. So each 3-D convolution equals the 2-D one with
that slice, and the rest of the decoder works frame by frame as it is. It costs a third of the multiplications.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowfleet.hardware import compiling


class SingleFrameDecoder(nn.Module):
    """(B, Z, h, w) VAE latents to (B, 3, 8h, 8w) pixels in [-1, 1], as `AutoencoderKLQwenImage.decode` of one frame.

    Built once from a loaded VAE, with which it shares the weights that need no slicing; both are frozen.
    """

    def __init__(self, vae: Any) -> None:
        super().__init__()
        decoder = vae.decoder
        self.layers = nn.Sequential(
            _FrameConv(vae.post_quant_conv),
            _FrameConv(decoder.conv_in),
            *_middle(decoder.mid_block),
            *(layer for block in decoder.up_blocks for layer in _up(block)),
            _Activation(decoder.norm_out, decoder.nonlinearity),
            _FrameConv(decoder.conv_out),
        )
        self.checkpoints = False
        """True if the backward computes a layer's activations again."""
        self.requires_grad_(False).eval()
        convolutions: Any = self.layers
        convolutions.to(memory_format=torch.channels_last)  # what their kernels on accelerators want

    def compile_activations(self) -> None:
        """Makes what lies between two convolutions compile itself at its first use: one or two passes in place of
        eight."""
        compiling.prepare()
        for module in self.modules():
            if isinstance(module, _Activation):
                module.compile()

    def forward(self, latents: Tensor) -> Tensor:
        x: Tensor = latents.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints and torch.is_grad_enabled() else layer(x)
        return x.clamp(-1, 1)


class _FrameConv(nn.Module):
    """The 2-D convolution that a causal 3-D one is for a single frame."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        depth, height, width = conv.kernel_size
        assert depth in (1, 3), f"a causal kernel of {depth} frames is not one of this VAE"
        self.weight = nn.Parameter(conv.weight.detach()[:, :, -1].contiguous())
        self.bias = nn.Parameter(conv.bias.detach())
        self.padding = height // 2, width // 2

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias, padding=self.padding)


class _Activation(nn.Module):
    """Each pixel's channel vector to length sqrt(C), times gamma, then the nonlinearity."""

    def __init__(self, norm: Any, nonlinearity: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter((norm.gamma * norm.scale).reshape(1, -1, 1, 1))
        self.nonlinearity = nonlinearity

    def forward(self, x: Tensor) -> Tensor:
        precise = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        activated: Tensor = self.nonlinearity(functional.normalize(precise, dim=1).to(x.dtype) * self.gain)
        return activated


class _ResidualBlock(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        is_identity = isinstance(block.conv_shortcut, nn.Identity)
        self.shortcut = nn.Identity() if is_identity else _FrameConv(block.conv_shortcut)
        self.layers = nn.Sequential(
            _Activation(block.norm1, block.nonlinearity),
            _FrameConv(block.conv1),
            _Activation(block.norm2, block.nonlinearity),
            _FrameConv(block.conv2),
        )

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.layers(x)
        shortcut: Tensor = self.shortcut(x)
        return residual + shortcut


class _Frame(nn.Module):
    """Runs a module of videos (B, C, 1, h, w) on images."""

    def __init__(self, video_module: nn.Module) -> None:
        super().__init__()
        self.video_module = video_module

    def forward(self, x: Tensor) -> Tensor:
        frame: Tensor = self.video_module(x.unsqueeze(2))
        return frame.squeeze(2)


def _middle(block: Any) -> list[nn.Module]:
    layers: list[nn.Module] = [_ResidualBlock(block.resnets[0])]
    for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
        layers += [_Frame(attention), _ResidualBlock(residual)]
    return layers


def _up(block: Any) -> list[nn.Module]:
    """Residual blocks, then the 2-D half of the upsampler, which is all that a first frame passes."""
    layers: list[nn.Module] = [_ResidualBlock(residual) for residual in block.resnets]
    for upsampler in block.upsamplers or ():
        layers.append(upsampler.resample)
    return layers
