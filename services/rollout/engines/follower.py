"""`python -m services.rollout.engines.follower FD PID`: one further device of the replica PID; see followers.py."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh

from flowfleet import plugins
from flowfleet.errors import DataLoss
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import ModelFamily
from flowfleet.process.service import end_with_parent, keep_freed_memory
from flowfleet.process.telemetry import configure_logging
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.quantization.layers import full_precision
from flowfleet.weights import weights
from flowfleet.weights.lora import adapter_disabled
from services.rollout.engines.followers import (
    HOST,
    Answer,
    Failed,
    Forward,
    Install,
    Load,
    Settings,
    Share,
    Verify,
    answer_of,
    broadcast,
    meet,
)
from services.rollout.engines.local import load_format
from services.rollout.engines.parallel import SplitEngine

log = logging.getLogger(__name__)


def main() -> None:
    """Executes rank 0's orders until there are no more or rank 0 is gone."""
    end_with_parent()
    if os.getppid() != int(sys.argv[2]):  # it died before we asked
        sys.exit(1)
    keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains, and then ends this process
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        settings: Settings = pipe.recv()
        configure_logging("rollout", logging.getLevelName(settings.log_level).lower())
        plugins.load()
        timeout = timedelta(seconds=settings.timeout_s)
        store = TCPStore(HOST, settings.store_port, timeout=timeout)
        device = torch.device(settings.device)
        engine = FollowerEngine(device, size=settings.size, max_batch=settings.max_batch, threads=settings.threads)
        engine.begin(settings.rank, lambda: meet(store, settings.rank, settings.size, device, timeout))
        while (order := pipe.recv()) is not None:
            engine.obey(order, pipe.send)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        log.exception("a follower failed")
        with suppress(EOFError, OSError):
            pipe.send(Failed(f"{type(error).__name__}: {error}"))
            while pipe.recv() is not None:
                pass
    _end()


class FollowerEngine(SplitEngine):
    """The transformers alone, in the process's one thread."""

    _rank: int

    def begin(self, rank: int, meet: Callable[[], DeviceMesh]) -> None:
        self._rank = rank
        self._set_up_thread()
        self._mesh = meet()

    @torch.no_grad()
    def obey(self, order: Any, answer: Callable[[Answer], None]) -> None:
        """Raises what fails inside a collective, which other ranks then wait for until it ends."""
        match order:
            case Share():
                broadcast([*self._live_weights().values()])
            case Forward():
                self._forward(order)
            case _:
                try:
                    self._do(order)
                except Exception as error:
                    is_refusal = isinstance(error, (ValueError, DataLoss))
                    what = type(order).__name__.lower()
                    log.warning("rank %d %s: %s", self._rank, what, error, exc_info=None if is_refusal else error)
                    answer(answer_of(error))
                else:
                    answer(None)

    def _do(self, order: Any) -> None:
        match order:
            case Load(model):
                self._load(ModelSpec.FromString(model))
            case Install(lora):
                self._install(None if lora is None else LoraSpec.FromString(lora))
            case Verify(hashes):
                self._verify(hashes)
            case _:
                raise AssertionError(order)

    def _forward(self, order: Forward) -> None:
        experts: dict[str, Any] = self._loaded().experts
        given = {
            name: torch.empty(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in order.tensors.items()
        }
        broadcast([*given.values()])
        with ExitStack() as inside:
            if order.without_lora:
                inside.enter_context(adapter_disabled(experts))
            if order.full_precision:
                inside.enter_context(full_precision(m for expert in experts.values() for m in expert.modules()))
            experts[order.component](**given, **order.others)

    def _components_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        adapter: ModelAdapter = family.load().load(
            model.path,
            dtype=weights.dtype_of(model.dtype),
            device=self.device,
            components=("transformer",),
            load_format=load_format(model),
        )
        return adapter


def _end() -> None:
    """Ends this process at once. A regular exit of the group would wait for ranks that may be gone."""
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
