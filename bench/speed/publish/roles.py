"""The processes of `bench.speed.publish`: `trainer` ranks under FSDP2, and `receiver`s."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.speed.publish.__main__ import TIMEOUT
from flowfleet.hardware import devices
from flowfleet.models.families.qwen_image import QwenImageAdapter
from flowfleet.proto.rollout_pb2 import Broadcast, FinishWeightUpdateRequest, LoraSpec, TransferGroup
from flowfleet.weights import hashing, lora, weights
from flowfleet.weights.transfer import TransferMember, TransferStore
from services.trainer.model.gather import Gather
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import local, shard_expert

DTYPE = torch.bfloat16
RANK = 64
TIMEOUT_S = 30.0
"""Timeout of a transfer group."""
_TINY = {
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}


def make_model(mode: str, tiny: bool, dtype: torch.dtype) -> QwenImageTransformer2DModel:
    """On the meta device; with an adapter in LoRA mode, whose dtype is `dtype`, over a base in bf16."""
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(**(_TINY if tiny else {}))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPE if mode == "lora" else dtype)
    if mode == "lora":
        spec = LoraSpec(rank=4 if tiny else RANK, alpha=2 * RANK, target_modules=QwenImageAdapter.lora_targets)
        lora.install_lora({"transformer": model}, spec, dtype=dtype)
    return model


def published(mode: str, model: Any) -> dict[str, Tensor]:
    """What travels, by published name."""
    named = lora.named_adapter_parameters if mode == "lora" else weights.full_parameters
    return dict(named({"transformer": model}))


class Trainer:
    """One rank. Its masters are fp32 and random; they change a little before every version."""

    def __init__(self, store: TCPStore, options: argparse.Namespace) -> None:
        self.ranks = Ranks()
        self._store, self._options = store, options
        model = make_model(options.mode, options.tiny, torch.float32)
        shard_expert(model, self.ranks, DTYPE)
        model.to_empty(device=self.ranks.device)
        self._weights = {name: parameter.detach() for name, parameter in published(options.mode, model).items()}
        self._model = model
        torch.manual_seed(self.ranks.rank)
        for tensor in self._weights.values():
            local(tensor).normal_(std=0.02)
        self._transfer = TransferStore("127.0.0.1", TIMEOUT_S) if self.ranks.rank == 0 else None

    def form(self, group_id: str, receivers: list[int]) -> TransferMember:
        """Rank 0 and the receivers of these numbers."""
        assert self._transfer is not None
        backend = self._options.backend or devices.backend(self.ranks.device)
        group = TransferGroup(
            group_id=group_id,
            backend=backend,
            store_host=self._transfer.host,
            store_port=self._transfer.port,
            world_size=len(receivers) + 1,
            timeout_s=TIMEOUT_S,
        )
        for group.rank, number in enumerate(receivers, start=1):
            self._store.set(f"group/{group_id}/{number}", group.SerializeToString())  # type: ignore[arg-type]
        group.rank = 0
        return TransferMember.join(group, self.ranks.device, self._transfer)

    def publish(self, member: TransferMember | None, version: str, receivers: list[int]) -> tuple[int, float, float]:
        """Collective, `member` on rank 0 alone. Bytes, the sender's seconds, and those until all have verified."""
        for tensor in self._weights.values():
            local(tensor).mul_(1.01)
        devices.synchronize(self.ranks.device)
        self.ranks.broadcast()
        gather = Gather(self._weights, DTYPE, self.ranks.device, self._options.bucket_bytes)
        if member is None:
            gather.rest()
            return 0, 0.0, 0.0
        start = time.perf_counter()
        self._store.set(f"go/{version}", Broadcast(buckets=gather.buckets).SerializeToString())  # type: ignore[arg-type]
        sent = weights.send(member, gather.buckets, gather.fill, self.ranks.device)
        sender = time.perf_counter() - start
        hashes = FinishWeightUpdateRequest(hashes=sent.hashes)
        self._store.set(f"hashes/{version}", hashes.SerializeToString())  # type: ignore[arg-type]
        for number in receivers:
            assert self._store.get(f"verified/{version}/{number}").decode() == weights.digest(sent.hashes)
        return sent.bytes, sender, time.perf_counter() - start


def measure(trainer: Trainer, store: TCPStore, rounds: int) -> None:
    member = trainer.form("bench", [1]) if trainer.ranks.rank == 0 else None
    runs = [trainer.publish(member, str(version), [1]) for version in range(rounds + 1)][1:]
    if member is not None:
        store.set("result", " ".join([str(runs[0][0]), *(f"{a} {b}" for _, a, b in runs)]))
        member.close()


def check(trainer: Trainer, store: TCPStore, together: bool) -> None:
    """Kills a receiver in the middle; the sender must be free at once, and another group must work."""
    lines = [check_hashes(trainer.ranks.device)]
    member = trainer.form("broken", [1, 2] if together else [1])
    known_at: list[float] = []
    watch(store, member, known_at)
    try:
        trainer.publish(member, "broken", [])
    except RuntimeError as error:
        free_at = time.perf_counter()
        while not known_at:
            time.sleep(0.01)
        late = max(0.0, free_at - known_at[0])
        lines.append(f"receiver killed in a broadcast: sender free {late:.2f} s after that is known ({error})")
    else:
        raise AssertionError("the broadcast continued without its receiver")
    size, _, seconds = trainer.publish(trainer.form("again", [2]), "again", [2])
    lines.append(f"next group: {size / 1e9:.3g} GB verified in {seconds:.2f} s")
    store.set("checked", "\n".join(lines))


def check_hashes(device: torch.device) -> str:
    """Device and CPU give the same for odd sizes, odd places and several dtypes."""
    generator = torch.Generator().manual_seed(0)
    sizes = (0, 1, 3, 7, 8, 1000, 4099, 70_001, 3_000_001)
    here = [torch.randn(size, generator=generator).to(dtype) for size in sizes for dtype in (DTYPE, torch.float32)]
    there = [tensor.to(device) for tensor in here]
    here, there = ([*part, *(tensor[1:] for tensor in part), part[-1][::3]] for part in (here, there))
    assert torch.equal(hashing.content_sums(there).cpu(), hashing.content_sums(here))
    kernel = "by Triton" if devices.has_triton(device) else "by torch"
    return f"{len(here)} hashes on {device.type} {kernel} equal those of the CPU"


def watch(store: TCPStore, member: TransferMember, known_at: list[float]) -> None:
    """Leaves the group, from a thread of its own, when a receiver is known to be dead; in the fleet a failed call or a
    cancelled one does that."""

    def wait() -> None:
        TCPStore("127.0.0.1", store.port, timeout=TIMEOUT).wait(["dead"])
        known_at.append(time.perf_counter())
        member.abort()

    threading.Thread(target=wait, daemon=True).start()


class Receiver:
    """A replica's end."""

    def __init__(self, store: TCPStore, options: argparse.Namespace) -> None:
        self._store, self._options = store, options
        self._device = devices.pick_device(int(os.environ["LOCAL_RANK"]))
        model = make_model(options.mode, options.tiny, DTYPE).to_empty(device=self._device)
        self._live = {name: parameter.detach() for name, parameter in published(options.mode, model).items()}

    def join(self, group_id: str) -> TransferMember:
        data = self._store.get(f"group/{group_id}/{self._options.number}")
        return TransferMember.join(TransferGroup.FromString(data), self._device)

    def update(self, member: TransferMember, version: str) -> None:
        """Receives and verifies one version; with `--die` the process ends at the second bucket."""
        buckets = list(Broadcast.FromString(self._store.get(f"go/{version}")).buckets)
        copy, left = weights.copy_into(self._live), len(buckets[0].parameters)

        def into(name: str, value: Tensor) -> None:
            nonlocal left
            copy(name, value)
            left -= 1
            if self._options.die and left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        weights.receive(member, buckets, into)
        hashes = FinishWeightUpdateRequest.FromString(self._store.get(f"hashes/{version}")).hashes
        self._store.set(f"verified/{version}/{self._options.number}", weights.verify(self._live, hashes))


def receive(receiver: Receiver, store: TCPStore, options: argparse.Namespace) -> None:
    if not options.check:
        member = receiver.join("bench")
        for version in range(options.rounds + 1):
            receiver.update(member, str(version))
        member.close()
        return
    if options.die or options.check == "together":
        member = receiver.join("broken")
        watch(store, member, [])
        try:
            receiver.update(member, "broken")
        except RuntimeError as error:
            logging.info("receiver %d: %s", options.number, error)
        else:
            raise AssertionError("the broadcast continued without a receiver")
    receiver.update(receiver.join("again"), "again")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("trainer", "receiver"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mode", default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="")
    parser.add_argument("--bucket-bytes", type=int, default=weights.BUCKET_BYTES)
    parser.add_argument("--check", default="")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--die", action="store_true")
    options = parser.parse_args()
    store = TCPStore("127.0.0.1", options.port, timeout=TIMEOUT)
    if options.role == "receiver":
        receive(Receiver(store, options), store, options)
        return
    trainer = Trainer(store, options)
    if options.check:
        check(trainer, store, options.check == "together")
    else:
        measure(trainer, store, options.rounds)
    trainer.ranks.close()


if __name__ == "__main__":
    main()
