"""vLLM's kernels for CPUs in torch, where vLLM is built without: slow, and right, for tests and laptops.

vLLM's own worker, model runner and layers for CPUs call these as `torch.ops._C.*`; a build with kernels keeps its own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

_NAMESPACE: Final = "_C"
_PROBE: Final = "cpu_attention_with_kv_cache"
"""An operator that every build for CPUs has."""


@cache
def install() -> Any:
    """Defines the operators that are missing, once. Returns their library, without which they would be gone."""
    if hasattr(getattr(torch.ops, _NAMESPACE), _PROBE):
        return None
    module: Any = torch.library
    library = module.Library(_NAMESPACE, "FRAGMENT")
    for schema, function in _OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    _choose_experts()
    return library


def keep_weights() -> None:
    """Keeps the weights of half-precision linears in place, in a build without kernels: where the CPU has AMX, vLLM
    would have such a kernel pack them, and published weights would not reach the copies."""
    from vllm.model_executor.layers import utils

    utils.check_cpu_sgl_kernel = lambda *_: False


def _choose_experts() -> None:
    """Experts are not padded, because published ones would have no place by name. Triton's, which vLLM takes for any
    model with an adapter, are replaced by those for CPUs."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    for kind in (cpu_moe.CPUUnquantizedExperts, *cpu_moe.CPUUnquantizedExperts.__subclasses__()):
        kind.output_alignment = kind.reduction_alignment = 1
    usual, backends = unquantized.backend_to_kernel_cls, unquantized.UnquantizedMoeBackend
    unquantized.backend_to_kernel_cls = lambda backend: usual(backends.CPU if backend is backends.TRITON else backend)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    sliding_window: int,
    block_table: Tensor,
    softcap: float,
    *unused: Any,
) -> None:
    """Attention of (N, heads, D) queries over paged keys and values, (blocks, kv heads, block, D), into `output`.

    Sequence i has the queries from `query_start_loc[i]` on, which are the last of its `seq_lens[i]` positions.
    """
    if alibi_slopes is not None or sliding_window >= 0 or softcap:
        raise NotImplementedError("vLLM is built without kernels: models with ALiBi, windows or soft caps need them")
    starts = query_start_loc.tolist()
    for number, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[number], starts[number + 1])
        count = rows.stop - rows.start
        blocks = block_table[number, : -(-length // key_cache.shape[2])].long()
        keys, values = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (key_cache, value_cache))
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count) if causal else None
        attended = F.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None], keys[None], values[None], mask, scale=scale, enable_gqa=True
        )
        output[rows] = attended[0].transpose(0, 1).reshape(output[rows].shape)


def write_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *unused: Any
) -> None:
    """Puts (N, kv heads, D) keys and values into their slots; those of padding are below 0."""
    slots = slot_mapping[: len(key)]
    kept = slots >= 0
    blocks, places = slots[kept] // key_cache.shape[2], slots[kept] % key_cache.shape[2]
    key_cache[blocks, :, places] = key[kept]
    value_cache[blocks, :, places] = value[kept]


def map_slots(starts: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """Where in the cache each token of the batch belongs."""
    count = int(starts[-1])
    rows = torch.repeat_interleave(torch.arange(len(starts) - 1), (starts[1:] - starts[:-1]).long())
    valid = positions[:count]
    slot_mapping[:count] = block_table[rows, valid // block_size].long() * block_size + valid % block_size
    slot_mapping[count:] = -1


def compute_experts(
    output: Tensor,
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    skip_weighted: bool,
    activation: str,
    isa: str,
) -> None:
    """A mixture's experts, gated by SiLU, of (N, width) tokens; `experts` and `weights` are (N, top_k)."""
    if activation != "silu" or w13_bias is not None or w2_bias is not None or skip_weighted:
        raise NotImplementedError(f"vLLM is built without kernels: experts with {activation} or biases need them")
    total = torch.zeros_like(output)
    for number in sorted(set(experts.flatten().tolist())):
        rows, places = torch.where(experts == number)
        gate, up = F.linear(hidden[rows], w13[number]).chunk(2, dim=-1)
        expert_output = F.linear(F.silu(gate) * up, w2[number])
        total.index_add_(0, rows, (expert_output * weights[rows, places, None]).to(total.dtype))
    output.copy_(total)


def _silu_and_mul(output: Tensor, gate_up: Tensor) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    output.copy_(F.silu(gate) * up)


def _copy(source: Tensor, packed: Tensor, isa: str) -> None:
    packed.copy_(source)


_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor block_table, Tensor(a!) slots, "
    "int block_size) -> ()": map_slots,
    "get_scheduler_metadata(int requests, int heads, int kv_heads, int head_dim, Tensor seq_lens, ScalarType dtype, "
    "Tensor starts, bool causal, int window, str isa, bool split, Tensor? dynamic, str cache_dtype) -> Tensor": (
        lambda *unused: torch.empty(0)
    ),
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
    "str isa, float k_scale, float v_scale, str cache_dtype) -> ()": write_cache,
    f"{_PROBE}(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, Tensor starts, Tensor seq_lens, "
    "float scale, bool causal, Tensor? slopes, int window, Tensor block_table, float softcap, Tensor metadata, "
    "Tensor? sinks, Tensor? dynamic, float k_scale, float v_scale, str cache_dtype) -> ()": attend,
    "prepack_moe_weight(Tensor weight, Tensor(a!) packed, str isa) -> ()": _copy,
    "cpu_fused_moe(Tensor(a!) output, Tensor hidden, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, "
    "Tensor weights, Tensor experts, bool skip_weighted, str activation, str isa) -> ()": compute_experts,
    "silu_and_mul(Tensor(a!) output, Tensor gate_up) -> ()": _silu_and_mul,
}
"""Operators by schema."""
