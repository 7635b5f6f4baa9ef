"""Adapter that every rank holds whole, next to a whole frozen base, without FSDP.

FSDP's hooks at each block, and a sum for each gradient, would take a sixth of the host's time in a pass, and a small
micro-batch waits for the host. Here the modules hold the adapter in the model's dtype, which each forward copies from
the fp32 masters; from masters in host memory (`trainer.offload`) once they changed. After a backward its gradients are
added up in fp32; they are all-reduced once per update. One flat tensor holds all parameters, so that copying or
reducing takes one call.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowfleet.hardware import devices
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import give_grad, grad_of, replicate

CHUNK = 2**26
"""Elements of gradients that are widened at a time."""
ALIGNMENT = 64
"""Elements that a parameter's place in a flat tensor is a multiple of: kernels are faster on aligned ones."""


class ReplicatedAdapter:
    """The trained adapter of one transformer. Its parameters have memory, and FSDP does not know them."""

    masters: dict[str, DTensor]
    """fp32, whole on every rank, by published name. The last `collect` of an update gives their gradients."""

    def __init__(
        self,
        expert: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        ranks: Ranks,
        dtype: torch.dtype,
        masters_on: torch.device | None = None,
    ) -> None:
        """Makes the trained parameters, by published name, copies of their masters in `dtype`; in fp32 the masters
        themselves. `masters_on`: None is the ranks' device."""
        self._ranks = ranks
        self._parameters = parameters
        self._masters, values = self._flat(torch.float32, masters_on)
        self._copied = -1
        """Version of the masters that the copies have."""
        self._copies = self._masters
        self.masters = {name: replicate(value, ranks) for name, value in values.items()}
        for name, parameter in parameters.items():
            values[name].copy_(parameter.detach())
        if dtype != torch.float32 or self._is_far:
            self._copies, values = self._flat(dtype)
            expert.register_forward_pre_hook(lambda *_: self.refresh())
        for name, parameter in parameters.items():
            parameter.data = values[name]  # autograd does not notice the copying: see `refresh`
        self._sums: Tensor | None = None
        self._places: dict[str, Tensor] = {}
        self._grads: dict[str, DTensor] = {}
        self._used: set[str] = set()

    def refresh(self) -> None:
        """Copies the masters; every forward does. Between a forward and its backward the masters must not change, nor
        be those of another policy: the backward would take the new ones, and autograd would not notice."""
        if self._copies is self._masters or (self._is_far and self._masters._version == self._copied):
            return
        for part, masters in zip(torch.split(self._copies, CHUNK), torch.split(self._masters, CHUNK), strict=True):
            part.copy_(masters)
        self._copied = self._masters._version  # writing to any view of them counts

    def collect(self, *, is_last: bool) -> None:
        """Adds the gradients of a backward to the sums. At an update's last backward, collective: the masters get the
        mean over the ranks as their gradients, where any backward of any rank gave one."""
        given = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        sums = self._sums if self._used and self._sums is not None else self._started()
        self._used |= given.keys()
        _add([self._places[name] for name in given], list(given.values()))
        for parameter in self._parameters.values():
            parameter.grad = None
        if is_last:
            used = torch.tensor([float(name in self._used) for name in self.masters])
            if self._ranks.world_size > 1:
                dist.all_reduce(sums)
                sums /= self._ranks.world_size
                used = self._ranks.max(used)
            for name, is_used in zip(self.masters, used.tolist(), strict=True):
                if is_used:
                    give_grad(self.masters[name], self._grads[name])
            self._used = set()

    def free(self) -> bool:
        """Frees the sums between updates. Returns True if there were any."""
        is_between = not self._used and all(grad_of(master) is None for master in self.masters.values())
        if not is_between or self._sums is None:
            return False
        self._sums, self._places, self._grads = None, {}, {}
        return True

    @property
    def _is_far(self) -> bool:
        return self._masters.device != self._ranks.device

    def _started(self) -> Tensor:
        """The flat sums, at zero; made at the first backward."""
        if self._sums is None:
            self._sums, self._places = self._flat(torch.float32)
            self._grads = {name: replicate(part, self._ranks) for name, part in self._places.items()}
        return self._sums.zero_()

    def _flat(self, dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Zeros, and each parameter's place in them."""
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in self._parameters.values()]
        flat = devices.byte_buffer(sum(sizes) * dtype.itemsize, device or self._ranks.device).view(dtype)
        parts = zip(self._parameters.items(), torch.split(flat, sizes), strict=True)
        return flat, {name: part[: p.numel()].view_as(p) for (name, p), part in parts}


def _add(sums: list[Tensor], grads: list[Tensor]) -> None:
    """Adds gradients in any dtype to fp32 sums, by few calls."""
    for part in _chunks(grads):
        wide = grads[part]
        if grads[0].dtype != torch.float32:
            wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads[part]]
            torch._foreach_copy_(wide, grads[part])
        torch._foreach_add_(sums[part], wide)


def _chunks(tensors: list[Tensor]) -> Iterator[slice]:
    """Slices of at most `CHUNK` elements, or of one tensor."""
    start, size = 0, 0
    for index, tensor in enumerate(tensors):
        if size and size + tensor.numel() > CHUNK:
            yield slice(start, index)
            start, size = index, 0
        size += tensor.numel()
    if size:
        yield slice(start, len(tensors))
