"""Diffusers engine that splits every sample over several devices, so that each sample is made faster.

This process is rank 0: it serves, encodes, samples and decodes as with one device. Only the transformers' forwards are
split (flowfleet/models/sequence_parallel.py). Rank 0 announces each forward to the followers (followers.py), which run
it too. Weights come to rank 0 as always; it passes them on, and every rank verifies them.

A rank that fails in a forward leaves the others waiting inside it. Then the running call is answered with the error,
all others are rejected, and the process ends.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowfleet.errors import Broken, Unavailable
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import ModelFamily, family_of
from flowfleet.models.sequence_parallel import plan_of, require_model, require_tokens, split
from flowfleet.proto.rollout_pb2 import Bucket, LoraSpec, ModelSpec
from flowfleet.weights import weights
from flowfleet.weights.lora import adapter_disabled
from services.rollout.engines.base import GeneratedBatch, GenerationRequest
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.followers import (
    FLAG,
    Followers,
    Forward,
    Install,
    Load,
    Share,
    Verify,
    answer_of,
    broadcast,
    require_devices,
)
from services.rollout.engines.loading import load_shares
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.sampler import Row, Sampler
from services.rollout.engines.shares import deal, require_shared

_ANSWER_S: Final = 1.0
"""Time for the answer to leave before the process ends."""

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class SplitEngine(DiffusersEngine):
    """Engine of every rank of a split forward: its transformers' forwards are shared by the ranks."""

    takes_tables = False
    _is_first = False

    def __init__(self, device: torch.device, *, size: int, **settings: Any) -> None:
        """`settings`: those of `LocalEngine`."""
        super().__init__(device, **settings)
        self.num_devices, self.slots = size, 0
        self._mesh: DeviceMesh | None = None

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        if family.shares_weights:
            assert self._mesh is not None
            return load_shares(family.load(), model, self.device, self._mesh["ulysses"], others=self._is_first)
        require_model(family, model.path, self.num_devices, FLAG)
        return self._components_of(model, family)

    def _components_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        return super()._adapter_of(model, family)

    def _set_up(self, adapter: ModelAdapter, model: ModelSpec) -> None:
        assert self._mesh is not None
        super()._set_up(adapter, model)
        if not self._shares_weights:
            split(adapter, self._mesh, self.device)
        for expert in adapter.experts.values() if self._shares_weights else ():
            deal(expert, self._mesh["ulysses"])

    @property
    def _shares_weights(self) -> bool:
        return self._family is not None and self._family.shares_weights

    def _prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        if family_of(model.path).shares_weights:
            require_shared(model, lora)
        super()._prepare(model, lora)

    def _install(self, lora: LoraSpec | None) -> None:
        if lora is not None and not self._shares_weights:
            _require_targets(self._loaded(), lora.target_modules)
        super()._install(lora)


class ParallelEngine(SplitEngine):
    """Rank 0 of `size`. `on_lost` ends the process when its ranks cannot be brought together again."""

    _is_first = True

    def __init__(self, device: torch.device, *, size: int, on_lost: Callable[[], None], **settings: Any) -> None:
        require_devices(device, size)
        super().__init__(device, size=size, **settings)
        self._on_lost = on_lost
        self._failure = ""
        """Why the ranks are lost, once they are."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost = asyncio.Event()
        self._followers = Followers(
            device,
            size,
            max_batch=self._max_batch,
            threads=self._threads,
            timeout_s=self.pulse.patient_s,
            on_failed=self._lose,
            on_died=on_lost,
        )
        self._in_forward = self._without_lora = self._full_precision = False

    @property
    def is_stuck(self) -> bool:
        return super().is_stuck or bool(self._failure)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._followers.close)

    def _run(
        self, work: AbstractContextManager[None], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Is answered also while the engine's thread waits for ranks that are lost."""
        if self._failure:
            raise self._refusal()
        self._loop = asyncio.get_running_loop()
        began = threading.Event()

        def unless_lost() -> T:
            if self._failure:
                raise self._refusal()
            began.set()
            return function(*args, **kwargs)

        return asyncio.ensure_future(self._unless_lost(super()._run(work, unless_lost), began))

    async def _unless_lost(self, running: asyncio.Future[T], began: threading.Event) -> T:
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((running, lost), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            raise Broken(self._failure) if began.is_set() else self._refusal()
        finally:
            running.cancel()
            lost.cancel()

    def _load(self, model: ModelSpec) -> None:
        if self._mesh is None:
            self._mesh = self._followers.meet()
        with self._together(Load(model.SerializeToString())):
            super()._load(model)

    def _set_up(self, adapter: ModelAdapter, model: ModelSpec) -> None:
        super()._set_up(adapter, model)
        for component, expert in adapter.experts.items():
            announce = partial(self._announce, component)
            expert.register_forward_pre_hook(announce, prepend=True, with_kwargs=True)  # FSDP's gather comes after it
            expert.register_forward_hook(self._went_well)
        self._sampler = Sampler(adapter, self._reference)

    def _install(self, lora: LoraSpec | None) -> None:
        with self._together(Install(None if lora is None else lora.SerializeToString())):
            super()._install(lora)

    def _load_adapter(self, state: Mapping[str, Tensor]) -> None:
        super()._load_adapter(state)
        self._share()

    def _receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        super()._receive(member, buckets)
        self._share()

    def _verify(self, hashes: Mapping[str, int]) -> str:
        with self._together(Verify(dict(hashes))):
            return super()._verify(hashes)

    def _check(self, request: GenerationRequest) -> None:
        if not (self._shares_weights or any(group.media for group in request.groups)):
            require_tokens(self._loaded(), request.sampling.size, self.num_devices, FLAG)
        super()._check(request)

    def _sample(
        self, request: GenerationRequest, encoded: Encoded, rows: Sequence[Row], checkpoint: Callable[[], None]
    ) -> GeneratedBatch:
        self._full_precision = request.sampling.full_precision
        try:
            return super()._sample(request, encoded, rows, checkpoint)
        except BaseException as error:
            if self._in_forward:
                self._fail("a forward failed on rank 0 of this replica", error)
            raise

    @contextmanager
    def _together(self, order: Load | Install | Verify) -> Iterator[None]:
        """Has the followers do the work inside too. Raises this process's failure, or else a follower's."""
        self._followers.order(order)
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        mine = None if failure is None else answer_of(failure)
        answers = self._followers.answers()
        if any(answer != mine for answer in answers):
            self._model = None  # The ranks differ: the next job loads it again.
        for rank, answer in enumerate(answers, 1):
            if failure is None and answer is not None:
                kind, text = answer
                failure = kind(f"rank {rank} of this replica: {text}")
        if failure is not None:
            raise failure

    def _share(self) -> None:
        """Passes an update's weights on to the followers."""
        self._followers.order(Share())
        try:
            broadcast([*self._live_weights().values()])
        except BaseException as error:
            self._fail("weights could not be handed to the other ranks of this replica", error)

    def _fail(self, what: str, error: BaseException) -> NoReturn:
        why = f"{what}: {type(error).__name__}: {error}"
        self._lose(why, error)
        raise Broken(why) from error

    def _lose(self, why: str, error: BaseException | None = None) -> None:
        """Answers the running call with `why`, rejects all others and ends the process. Any thread may call it."""
        if self._failure:
            return
        self._failure = why
        log.error("%s; the replica ends", why, exc_info=error)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._lost.set)
        end = threading.Timer(_ANSWER_S, self._on_lost)
        end.daemon = True
        end.start()

    def _refusal(self) -> Unavailable:
        return Unavailable(f"this replica ends, call another: {self._failure}")

    def _announce(
        self, component: str, expert: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        assert not args, "a family that splits tokens names its transformer's arguments"
        given = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in given.items() if name not in tensors}
        self._in_forward = True
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._followers.order(Forward(component, kinds, others, self._without_lora, self._full_precision))
        broadcast([*tensors.values()])
        return args, given

    def _went_well(self, *_: object) -> None:
        self._in_forward = False

    @contextmanager
    def _reference(self) -> Iterator[None]:
        self._without_lora = True
        try:
            with adapter_disabled(self._loaded().experts):
                yield
        finally:
            self._without_lora = False


def _require_targets(adapter: ModelAdapter, targets: Sequence[str]) -> None:
    """Raises ValueError for a LoRA of a layer at which tokens are split or gathered."""
    for expert in adapter.experts.values():
        for name in filter(None, plan_of(adapter, expert).modules):
            if any(name == target or name.endswith(f".{target}") for target in targets):
                raise ValueError(
                    f"trainer.lora.target_modules: {name} cannot be adapted where several devices share a sample: "
                    f"remove it, or sample in a pool of replicas with one device ({FLAG} 1)"
                )
