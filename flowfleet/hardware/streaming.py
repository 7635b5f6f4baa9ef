"""Modules that stay in pinned host memory, and are on the device a layer at a time while they compute.

For text encoders on small devices: each prompt is encoded once, so that its weights may cross the bus each time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from flowfleet.hardware import devices

_ALIGNMENT = 256
"""Bytes that a parameter's place is a multiple of."""


def stream(module: nn.Module, device: torch.device) -> None:
    """Moves a frozen module's parameters to the host. A layer of a list has its own on `device` during its forward, and
    the rest of the module during the module's. Results have the same bits as those of a module on the device."""
    layers = _layers(module)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in module.parameters() if id(parameter) not in inside]
    for part, parameters in [(layer, list(layer.parameters())) for layer in layers] + [(module, outside)]:
        group = _Group(parameters, device)
        part.register_forward_pre_hook(lambda *_, group=group: group.bring())
        part.register_forward_hook(lambda *_, group=group: group.drop(), always_call=True)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)


class _Group:
    """Parameters that come and go together, by one copy."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters, self._device = list(parameters), device
        self._sizes = [-(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT for parameter in self._parameters]
        self._host = devices.byte_buffer(sum(self._sizes), torch.device("cpu"))
        held = [parameter.data for parameter in self._parameters]
        self.drop()
        for parameter, tensor in zip(self._parameters, held, strict=True):
            parameter.data.copy_(tensor)

    def bring(self) -> None:
        self._point_to(self._host.to(self._device, non_blocking=True))

    def drop(self) -> None:
        self._point_to(self._host)

    def _point_to(self, flat: Tensor) -> None:
        for parameter, part in zip(self._parameters, torch.split(flat, self._sizes), strict=True):
            parameter.data = part[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)


def _layers(module: nn.Module) -> list[nn.Module]:
    """Members of lists of modules, the outermost lists alone."""
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _layers(child)
    return found
