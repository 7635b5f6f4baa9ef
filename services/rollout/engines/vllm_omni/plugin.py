"""The entry point of group `vllm_omni.platform_plugins`: gives vLLM-Omni a CPU to run on.

vLLM-Omni calls it in every process that imports it, so it does nothing unless one of our engines set `ASKED`.
"""

import os

TARGET = "VLLM_TARGET_DEVICE"
"""vLLM's variable for the kind of device; "cpu" asks for our platform."""
ASKED = "FLOWFLEET_VLLM_OMNI"
"""Set by our engines, for their process and for those that vLLM-Omni starts there."""


def set_environment(kind: str, **more: str) -> None:
    """Sets the variables that vLLM reads when it is imported, for a kind of device, and `more` of them."""
    os.environ.update({ASKED: "1", **more})
    if kind == "cpu":
        os.environ.setdefault(TARGET, "cpu")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def register() -> str | None:
    """The name of our platform's class where our engine asks for the CPU; None elsewhere, so that vLLM-Omni takes its
    own."""
    if ASKED not in os.environ:
        return None
    from services.rollout.engines.vllm_omni import slim_imports

    slim_imports.install()
    return "services.rollout.engines.vllm_omni.platform.CpuOmniPlatform" if os.environ.get(TARGET) == "cpu" else None
