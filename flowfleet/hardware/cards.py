"""Accelerators by name: memory, peak and kinds of products, from their makers' data sheets. Free of torch."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Card:
    """A device as `flowfleet plan --device` names it."""

    part: str
    """Words of the name that its driver gives: a regular expression."""
    memory_gib: float
    """Memory that the driver reports."""
    peak_flops: float
    """FLOP/s of dense products of bf16 (Ascend: fp16) matrices that add up in float32: half of the advertised number
    on GeForce."""
    has_fp8: bool = False
    """True if it multiplies float8 matrices in hardware as our products want it, twice as fast."""


CARDS: Final = {
    "rtx-3090": Card("RTX 3090", 24.0, 71e12),
    "rtx-4090": Card("RTX 4090", 24.0, 165e12, has_fp8=True),
    "rtx-5090": Card("RTX 5090", 31.8, 209e12, has_fp8=True),
    "rtx-6000-ada": Card("RTX 6000 Ada", 48.0, 364e12, has_fp8=True),
    "rtx-pro-6000": Card("RTX PRO 6000", 95.6, 503e12, has_fp8=True),
    "a40": Card("A40", 45.0, 150e12),
    "a6000": Card("RTX A6000", 48.0, 155e12),
    "l4": Card("L4", 22.5, 121e12, has_fp8=True),
    "l20": Card("L20", 45.0, 119e12, has_fp8=True),
    "l40s": Card("L40S", 45.0, 362e12, has_fp8=True),
    "a100-40": Card("A100-SXM4-40GB", 39.4, 312e12),
    "a100": Card("A100", 79.2, 312e12),
    "a800": Card("A800", 79.2, 312e12),
    "h20": Card("H20", 95.6, 148e12, has_fp8=True),
    "h100-nvl": Card("H100 NVL", 93.6, 835e12, has_fp8=True),
    "h100-pcie": Card("H100 PCIe", 79.6, 756e12, has_fp8=True),
    "h100": Card("H100", 79.6, 989e12, has_fp8=True),
    "h800": Card("H800", 79.6, 989e12, has_fp8=True),
    "h200": Card("H200", 140.4, 989e12, has_fp8=True),
    "b200": Card("B200", 179.0, 2250e12, has_fp8=True),
    "b300": Card("B300", 268.0, 2250e12, has_fp8=True),
    "mi300x": Card("MI300X", 192.0, 1307e12),
    "mi355x": Card("MI355X", 288.0, 2300e12),
    "ascend-910b": Card(r"Ascend910B\d?", 61.0, 376e12),
}
"""A card whose words are also in the name of another comes after it."""


def card_of(device_name: str) -> Card | None:
    """The card that a driver names so; None for others."""
    return next((card for card in CARDS.values() if re.search(rf"\b{card.part}\b", device_name)), None)


def card_named(name: str) -> Card:
    """Raises ValueError for a name that is not in `CARDS`."""
    if name not in CARDS:
        raise ValueError(f"--device {name}: give one of {', '.join(sorted(CARDS))}, or --device-memory GIB")
    return CARDS[name]
