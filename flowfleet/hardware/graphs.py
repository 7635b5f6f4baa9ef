"""CUDA graphs of a module's forward, and of its backward: small batches then no longer wait for launches.

    first call of a kind    launched with its backward: compiles, and makes what is cached
    next call               captured, then replayed
    later calls             inputs copied to where the graph reads them, replayed, outputs copied

A kind is the shapes of the tensors, all other arguments, and what `state` says of the module. Parameters are read where
they lie, so that they change in place alone; `clear` forgets graphs when modules change. All graphs share one pool of
memory, because no two are ever at work: between a forward with gradient and its backward, other calls are launched.
Results have the bits of launched ones.
"""

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

MOST_GRAPHS: Final = 24
"""Kinds that are kept, the newest; each takes some tens of MiB besides the pool."""
MOST_ELEMENTS: Final = 2**19
"""Elements of the first tensor from which a call keeps the device busy by itself: 8 pictures of 512 by 512 pixels."""


@dataclass
class _Captured:
    inputs: list[Tensor]
    outputs: list[Tensor]
    shape: Callable[[list[Tensor]], Any]
    """The module's result of its tensors."""
    forward: Any
    backward: Any = None
    grad: Tensor | None = None
    """Gradient of the only output."""
    trained: tuple[nn.Parameter, ...] = ()
    """Parameters that the backward gives a gradient."""


class _Flight:
    """A forward whose backward is to come; gone with the autograd graph."""


class Graphs:
    """Takes the place of a module's `forward`. Thread-safe as the module is: one call at a time."""

    def __init__(
        self,
        module: nn.Module,
        *,
        state: Callable[[], Hashable] = lambda: None,
        trains: bool = False,
        may_replay: Callable[[], bool] = lambda: True,
    ) -> None:
        """`state`: says how the module computes, where that can change. `trains`: forwards with gradient are captured
        too; the gradients of parameters are then whole after each backward, and inputs get none. `may_replay`: asked
        before these."""
        self._module, self._plain, self._state, self._trains = module, module.forward, state, trains
        self._may_replay = may_replay
        self._warm: set[Hashable] = set()
        """Kinds of which a call was launched, and its backward."""
        self._graphs: OrderedDict[Hashable, _Captured | None] = OrderedDict()
        """None where the capture failed."""
        self._pool: Any = None
        self._stream: Any = None
        """Where forwards with gradient run."""
        self._grads: dict[nn.Parameter, Tensor] = {}
        """Where backwards leave gradients."""
        self._flight: Callable[[], _Flight | None] = lambda: None
        update_wrapper(self, module.forward)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((args, kwargs)))
        if not (self._trains and torch.is_grad_enabled() and tensors and tensors[0].is_cuda):
            return self._called(tensors, args, kwargs)
        # A parameter's node in an older autograd graph belongs to the stream of that forward. A capture must not wait
        # for another stream, so that forwards with gradient all run on its own.
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._called(tensors, args, kwargs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _called(self, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._takes(tensors):
            return self._plain(*args, **kwargs)
        kind = torch.is_grad_enabled(), self._state(), _kind(args), _kind(kwargs)
        if kind not in self._graphs:
            if kind not in self._warm:
                return self._launched(kind, args, kwargs)
            self._keep(kind, self._capture(args, kwargs))
        self._graphs.move_to_end(kind)
        captured = self._graphs[kind]
        if captured is None:
            return self._plain(*args, **kwargs)
        torch._foreach_copy_(captured.inputs, tensors)
        return captured.shape(self._replay(captured))

    def is_in_flight(self) -> bool:
        """Returns True between the replays of a forward with gradient and of its backward."""
        return self._flight() is not None

    @property
    def holds(self) -> bool:
        """True if graphs hold memory."""
        return bool(self._graphs)

    def clear(self) -> None:
        """Forgets all graphs, and that kinds were launched."""
        self._warm.clear()
        self.release()

    def release(self) -> None:
        """Frees the memory of all graphs; each is captured again at its next call."""
        self._graphs.clear()
        self._forget()

    def _forget(self) -> None:
        """Frees the memory of graphs, but remembers of which kinds the capture failed."""
        for kind in [kind for kind, captured in self._graphs.items() if captured is not None]:
            del self._graphs[kind]
        self._grads.clear()
        self._pool = None

    def _launched(self, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._plain(*args, **kwargs)
        trained = [output for output in _tensors(result) if output.requires_grad]
        for output in trained:
            output.register_hook(lambda _: self._warm.add(kind))  # type: ignore[no-untyped-call]
        if not trained:
            self._warm.add(kind)
        return result

    def _takes(self, tensors: list[Tensor]) -> bool:
        is_small = bool(tensors) and tensors[0].numel() <= MOST_ELEMENTS and all(tensor.is_cuda for tensor in tensors)
        is_known = not torch.is_grad_enabled() or (self._trains and not any(it.requires_grad for it in tensors))
        is_free = not self.is_in_flight() and (not torch.is_grad_enabled() or self._may_replay())
        return is_small and is_known and is_free and not torch.cuda.is_current_stream_capturing()

    def _keep(self, kind: Hashable, captured: _Captured | None) -> None:
        self._graphs[kind] = captured
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captured | None:
        try:
            return self._captured(args, kwargs)
        except RuntimeError as error:  # no memory, or a kernel that waits for the device, as some models have
            log.warning("could not capture a CUDA graph, this kind of batch stays launched: %s", error)
        self._forget()  # the pool keeps what the capture took, as long as any graph uses it
        return None

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captured:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        if torch.is_grad_enabled() and not self._grads:
            self._grads = {it: torch.empty_like(it) for it in self._module.parameters() if it.requires_grad}
        static_args, static_kwargs = _mapped((args, kwargs), lambda tensor: tensor.detach().clone())
        forward, backward = torch.cuda.CUDAGraph(), None
        with self._capturing(forward):
            result = self._plain(*static_args, **static_kwargs)
        outputs = list(_tensors(result))
        grad: Tensor | None = None
        trained: tuple[nn.Parameter, ...] = ()
        if torch.is_grad_enabled():
            backward, grad = torch.cuda.CUDAGraph(), torch.zeros_like(outputs[0])
            with self._capturing(backward):
                trained = self._backward(outputs, grad)
        bare = _mapped(result, Tensor.detach)

        def shape(tensors: list[Tensor]) -> Any:
            rest = iter(tensors)
            return _mapped(bare, lambda _: next(rest))

        inputs = list(_tensors((static_args, static_kwargs)))
        return _Captured(inputs, list(_tensors(bare)), shape, forward, backward, grad, trained)

    def _backward(self, outputs: list[Tensor], grad: Tensor) -> tuple[nn.Parameter, ...]:
        """Leaves gradients where those of all kinds go, so that no graph keeps its own."""
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(outputs, parameters, grad, allow_unused=True)
        used = [(parameter, made) for parameter, made in zip(parameters, found, strict=True) if made is not None]
        trained = tuple(parameter for parameter, _ in used)
        torch._foreach_copy_([self._grads[parameter] for parameter in trained], [made for _, made in used])
        return trained

    @contextmanager
    def _capturing(self, graph: Any) -> Iterator[None]:
        """Other threads may use the device meanwhile. Garbage is kept: a graph that is freed ends the capture."""
        stream = self._stream if torch.is_grad_enabled() else None
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            if collects:
                gc.enable()

    def _replay(self, captured: _Captured) -> list[Tensor]:
        if captured.backward is None:
            captured.forward.replay()
            return [output.clone() for output in captured.outputs]
        flight = _Flight()
        self._flight = ref(flight)
        anchor = captured.grad.new_zeros((), requires_grad=True)  # type: ignore[union-attr]
        return [_Replay.apply(anchor, self, captured, flight)]  # type: ignore[no-untyped-call]

    def _add_grads(self, captured: _Captured) -> None:
        """Replays the backward and gives each parameter its gradient, on memory that the next one overwrites."""
        for parameter in captured.trained:
            if parameter.grad is self._grads[parameter]:
                parameter.grad = parameter.grad.clone()
        captured.backward.replay()
        for parameter in captured.trained:
            grad = self._grads[parameter]
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self._flight = lambda: None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graphs: Graphs, captured: _Captured, flight: _Flight) -> Tensor:
        ctx.graphs, ctx.captured, ctx.flight = graphs, captured, flight
        captured.forward.replay()
        return captured.outputs[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        captured: _Captured = ctx.captured
        assert captured.grad is not None
        captured.grad.copy_(grads[0])
        ctx.graphs._add_grads(captured)
        return None, None, None, None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value


def _kind(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(_kind(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    return value  # type: ignore[no-any-return]
