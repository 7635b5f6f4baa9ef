"""Weights on their way from the trainer to the replicas: hashes and buckets, and their use at both ends.

Weights travel as buckets: a bucket is one flat byte buffer that holds its parameters one behind the other, each at an
offset that is a multiple of 16. The trainer calls `send`, every replica `receive`, over a `TransferMember`. With
broadcast and adapter blob alike, a replica then calls `verify` on the parameters it really has, and serves the new
version only after that. The adapter's own part is in `flowfleet.weights.lora`.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flowfleet.errors import DataLoss
from flowfleet.hardware import devices
from flowfleet.proto.rollout_pb2 import Bucket, ParameterSpec
from flowfleet.weights.hashing import content_sums

BUCKET_BYTES = 256 * 2**20
_ALIGN = 16
_BUFFERS = 3
"""Buckets in flight at either end."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8)
}


class Pending(Protocol):
    def wait(self) -> None: ...


class Member(Protocol):
    """Member of a transfer group as `send` and `receive` need it: rank 0 sends, all others receive."""

    device: torch.device

    def broadcast(self, flat: Tensor) -> Pending: ...


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16". Raises ValueError for one that weights never have."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r}: weights travel as {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Hashes ---------------------------------------------------------------------------------------------------------------


def tensor_hashes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Position-dependent 64-bit hashes of tensors' dtypes, shapes and bytes by name, computed on their one device.

    A hash is the sum of `hashing.content_sums` plus the first 8 bytes of sha256 of dtype and shape, modulo 2^64.
    Swapped elements, unlike in a plain sum, change it. It guards against mistakes and torn transfers, not against an
    adversary. The device is waited for once.
    """
    hashes = Hashes()
    hashes.add(tensors)
    return hashes.result()


class Hashes:
    """`tensor_hashes` of tensors that come in batches; the device is waited for in `result` alone."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._heads: list[int] = []
        self._sums: list[Tensor] = []

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Tensors of one device. They may change as soon as the current stream has passed this point."""
        named = list(tensors)
        self._names += [name for name, _ in named]
        for _, tensor in named:
            head = hashlib.sha256(f"{dtype_name(tensor.dtype)}:{list(tensor.shape)}".encode()).digest()
            self._heads.append(int.from_bytes(head[:8], "little"))
        if named:
            self._sums.append(content_sums([tensor for _, tensor in named]))

    def result(self) -> dict[str, int]:
        """Hashes by name, of everything added."""
        sums = torch.cat(self._sums).tolist() if self._sums else []
        return {n: (value + head) % 2**64 for n, head, value in zip(self._names, self._heads, sums, strict=True)}


def digest(hashes: Mapping[str, int]) -> str:
    """Returns a hex sha256 of a whole set of parameters, independent of their order."""
    text = "".join(f"{name}:{hashes[name]:016x}\n" for name in sorted(hashes))
    return hashlib.sha256(text.encode()).hexdigest()


def verify(loaded: Mapping[str, Tensor], expected: Mapping[str, int]) -> str:
    """Hashes what was loaded and returns the digest. Raises DataLoss naming parameters that differ from `expected`."""
    missing, extra = sorted(expected.keys() - loaded.keys()), sorted(loaded.keys() - expected.keys())
    if missing or extra:
        raise DataLoss(f"weights differ in their names: not loaded {missing[:3]}, not expected {extra[:3]}")
    actual = tensor_hashes(loaded.items())
    wrong = [name for name in sorted(expected) if actual[name] != expected[name]]
    if wrong:
        first = loaded[wrong[0]]
        raise DataLoss(
            f"{len(wrong)} of {len(expected)} parameters do not match the hash that the trainer sent, the first is "
            f"{wrong[0]} ({dtype_name(first.dtype)} {list(first.shape)}); the update has to be sent again"
        )
    return digest(actual)


# Buckets --------------------------------------------------------------------------------------------------------------


def specs_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> list[ParameterSpec]:
    """Names, shapes and dtypes (or `dtype` for all) in the mapping's order."""
    return [
        ParameterSpec(name=name, shape=list(tensor.shape), dtype=dtype_name(dtype or tensor.dtype))
        for name, tensor in tensors.items()
    ]


def make_buckets(specs: Iterable[ParameterSpec], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Packs parameters in order into buckets of at most `bucket_bytes`; a larger parameter gets a bucket of its own."""
    buckets: list[Bucket] = []
    used = 0
    for spec in specs:
        size = aligned(spec_bytes(spec))
        if not buckets or used + size > bucket_bytes:
            buckets.append(Bucket())
            used = 0
        buckets[-1].parameters.append(spec)
        used += size
    return buckets


def require_every_weight(live: Mapping[str, Tensor], buckets: Sequence[Bucket]) -> None:
    """Raises ValueError unless the buckets hold every live weight once."""
    sent = [spec.name for bucket in buckets for spec in bucket.parameters]
    if sorted(sent) != sorted(live):
        missing, extra = sorted(live.keys() - set(sent)), sorted(set(sent) - live.keys())
        raise ValueError(
            f"the buckets do not hold every weight once: missing {missing[:3]}, unexpected {extra[:3]}; trainer "
            "and replica must load the same model and adapter"
        )


def spec_bytes(spec: ParameterSpec) -> int:
    return prod(spec.shape) * dtype_of(spec.dtype).itemsize


class Sent(NamedTuple):
    """Result of `send`: the buckets' bytes, and the hash of each parameter as it lay in its bucket."""

    bytes: int
    hashes: dict[str, int]


Fill = Callable[[Bucket, Tensor], None]
"""Writes a bucket's parameters into its buffer, at the places that `views` gives."""


def send(member: Member, buckets: Sequence[Bucket], fill: Fill, device: torch.device | None = None) -> Sent:
    """Broadcasts every bucket from rank 0. Raises RuntimeError when a member is gone or late.

    `fill` writes on `device`, default the member's. While buckets are on their way the next is filled and hashed; at
    most `_BUFFERS` buffers are alive, twice as many where the broadcast takes them from the host's memory.
    """
    device = device or member.device
    buffers, hashes = _buffers(buckets, device), Hashes()
    staging = None if device == member.device else _buffers(buckets, member.device)
    pending: deque[Pending] = deque()
    for number, bucket in enumerate(buckets):
        if len(pending) == _BUFFERS:
            pending.popleft().wait()
        size, turn = bucket_bytes(bucket), number % _BUFFERS
        flat = buffers[turn][:size]
        fill(bucket, flat)
        hashes.add((spec.name, view) for spec, view in views(bucket, flat))
        pending.append(member.broadcast(flat if staging is None else staging[turn][:size].copy_(flat)))
    for transfer in pending:
        transfer.wait()
    return Sent(sum(map(bucket_bytes, buckets)), hashes.result())


def receive(member: Member, buckets: Sequence[Bucket], into: Callable[[str, Tensor], None]) -> None:
    """Receives every bucket from rank 0 and hands each parameter (a view that must be copied at once) to `into`.

    The next buckets come in while one is copied. Raises RuntimeError when the trainer is gone or late, ValueError when
    `into` refuses a parameter.
    """
    buffers = _buffers(buckets, member.device)
    pending: deque[tuple[Bucket, Tensor, Pending]] = deque()

    def unpack() -> None:
        bucket, flat, transfer = pending.popleft()
        transfer.wait()
        for spec, view in views(bucket, flat):
            into(spec.name, view)

    for number, bucket in enumerate(buckets):
        flat = buffers[number % _BUFFERS][: bucket_bytes(bucket)]
        pending.append((bucket, flat, member.broadcast(flat)))
        if len(pending) == _BUFFERS:
            unpack()
    while pending:
        unpack()


def copy_into(parameters: Mapping[str, Tensor]) -> Callable[[str, Tensor], None]:
    """The usual `into`: copies into existing parameters. Raises ValueError on an unknown name, shape or dtype."""

    @torch.no_grad()
    def into(name: str, value: Tensor) -> None:
        target = parameters.get(name)
        if target is None:
            raise ValueError(f"the model here has no parameter {name}: trainer and replica load different models")
        if target.shape != value.shape or target.dtype != value.dtype:
            raise ValueError(
                f"{name} is {dtype_name(target.dtype)} {list(target.shape)} here and {dtype_name(value.dtype)} "
                f"{list(value.shape)} at the trainer: both must load the same model in the job's model.dtype"
            )
        target.copy_(value)

    return into


def full_parameters(experts: Mapping[str, torch.nn.Module]) -> dict[str, Tensor]:
    """Returns the parameters that full fine-tuning publishes: all of all transformers, as `<component>.<name>`."""
    return {
        f"{component}.{name}": parameter
        for component, module in experts.items()
        for name, parameter in module.named_parameters()
    }


def bucket_bytes(bucket: Bucket) -> int:
    """Size of its buffer."""
    return sum(aligned(spec_bytes(spec)) for spec in bucket.parameters)


def views(bucket: Bucket, flat: Tensor) -> Iterator[tuple[ParameterSpec, Tensor]]:
    """The bucket's parameters as parts of its (bucket_bytes,) uint8 buffer."""
    offset = 0
    for spec in bucket.parameters:
        size = spec_bytes(spec)
        yield spec, flat[offset : offset + size].view(dtype_of(spec.dtype)).view(tuple(spec.shape))
        offset += aligned(size)


def aligned(size: int) -> int:
    """Bytes that `size` bytes take in a bucket."""
    return -(-size // _ALIGN) * _ALIGN


def _buffers(buckets: Sequence[Bucket], device: torch.device) -> list[Tensor]:
    size = max(map(bucket_bytes, buckets), default=0)
    return [devices.byte_buffer(size, device) for _ in range(min(_BUFFERS, len(buckets)))]
