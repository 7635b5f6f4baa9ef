"""Controller and rewards install without torch: what they import from `flowfleet` must not load it."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "errors", "rpc.endpoint", "process.service", "process.telemetry", "data.blobs", "redis.keys", "redis.client",
    "redis.server", "data.streams", "job.spec", "seeds", "plugins", "job.rules", "algorithms.advantages",
    "algorithms.preferences", "media.files", "media.image_stats", "algorithms.registry", "algorithms.windows",
    "models.registry", "models.settings",
]  # fmt: skip


@pytest.mark.parametrize("heavy", ["torch", "safetensors", "transformers"])
def test_these_modules_load_without(heavy: str) -> None:
    """Blocking the import proves more than looking for it afterwards: a guarded import would pass unseen."""
    modules = ", ".join(f"flowfleet.{name}" for name in TORCH_FREE)
    code = f"import sys; sys.modules[{heavy!r}] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_flows_load_without_what_text_needs() -> None:
    """Samples and the base of engines serve flows and text."""
    heavy = {"transformers", "diffusers", "torch._dynamo", "peft"}
    modules = "flowfleet.data.sequences, services.rollout.engines.base"
    code = f"import sys, {modules}; sys.exit({heavy!r} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "set()\n"
