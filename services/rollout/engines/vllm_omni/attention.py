"""Attention on CPUs: torch's `scaled_dot_product_attention`, as vLLM-Omni calls it elsewhere."""

from torch import Tensor
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: object = None) -> Tensor:
        """(B, T, heads, D) each; a mask (B, T) of the keys is in `attn_metadata`, if any."""
        attended: Tensor = self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")
        return attended


class CpuSDPABackend(SDPABackend):
    supported_platforms = None

    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        return CpuSDPAImpl
