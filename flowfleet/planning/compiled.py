"""Memory that a compiled block saves for its backward, as decided by torch.compile's own partitioner.

The block's forward and backward are traced on the meta device as one graph of primitive operations, which is cut where
the fewest bytes cross: cheap point-wise operations are computed again, products of matrices and attention are not.
Nothing is compiled. For Qwen-Image with LoRA at 512² this gives 2.04 GiB for 16 rows of a block; 122 GiB for 60 blocks
was measured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flowfleet.planning.skeleton import MetaRun

VIEWS = {
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "alias"),
    *("slice", "select", "detach", "split", "split_with_sizes", "unbind", "view_as_real", "view_as_complex"),
}
"""Operations whose results lie in the memory of their input."""


def compiled_bytes(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that a compiled block keeps from its forward to its backward, without its parameters and its inputs.

    Args:
        block: on the meta device, with `requires_grad` as in training.
        args, kwargs: what its forward is called with.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table

    named = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    leaves, spec = tree_flatten((args, kwargs))
    inputs = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)]

    def call(weights: list[Tensor], tensors: list[Tensor]) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        positional, by_name = tree_unflatten(filled, spec)
        with MetaRun():
            return torch.func.functional_call(block, dict(zip(named, weights, strict=True)), positional, by_name)

    partition = _Partition()
    traced = aot_function(
        call,
        fw_compiler=_as_it_is,
        bw_compiler=_as_it_is,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    traced(list(named.values()), inputs)
    return partition.saved_bytes


class _Partition:
    saved_bytes = 0

    def __call__(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = min_cut_rematerialization_partition
        forward, backward = split(joint, inputs, **options)
        self.saved_bytes = _saved_bytes(forward, int(options["num_fwd_outputs"]))
        return forward, backward


def _saved_bytes(forward: fx.GraphModule, num_outputs: int) -> int:
    """Bytes that the forward's graph returns beyond its outputs. Outputs count as the next block's inputs."""
    (results,) = next(node.args for node in forward.graph.nodes if node.op == "output")
    nodes: Any = results
    outputs = {_root(node) for node in nodes[:num_outputs] if isinstance(node, fx.Node)}
    saved = {_root(node) for node in nodes[num_outputs:] if isinstance(node, fx.Node)}
    return sum(_bytes(node) for node in saved - outputs if node.op != "placeholder")


def _root(node: fx.Node) -> fx.Node:
    """The node in whose memory this one lies."""
    while node.op == "call_function" and _operation(node) in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _operation(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    source = node.args[0] if node.args else None
    is_part = getattr(node.target, "__name__", "") == "getitem" and isinstance(source, fx.Node)
    return _operation(source) if is_part and _operation(source) in VIEWS else ""  # type: ignore[arg-type]


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def _as_it_is(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
    return gm
