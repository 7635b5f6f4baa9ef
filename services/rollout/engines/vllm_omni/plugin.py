"""The entry point of group `vllm_omni.platform_plugins`: gives vLLM-Omni a CPU to run on."""

from __future__ import annotations

import os

from services.rollout.engines.vllm_omni import slim_imports

TARGET = "VLLM_TARGET_DEVICE"
"""vLLM's variable for the kind of device; "cpu" asks for our platform."""


def register() -> str | None:
    """The name of our platform's class where the CPU is asked for; None elsewhere, so that vLLM-Omni takes its own."""
    slim_imports.install()
    return "services.rollout.engines.vllm_omni.platform.CpuOmniPlatform" if os.environ.get(TARGET) == "cpu" else None
