"""docs/metrics.md names every metric that a trainer gives."""

import re
from pathlib import Path
from typing import Any

import pytest

from flowfleet.data.blobs import SyncBlobs
from services.trainer.parallel.ranks import Ranks
from tests.services.trainer.steps import Drawer, make_spec
from tests.services.trainer.workers import make_worker

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "flow_grpo", "kl_coef": 0.1, "correction": {"mode": "band"}, "old_log_probs": "recompute"},
    {"name": "diffusion_nft", "kl_coef": 0.1, "num_noise_levels": 1},
    {"name": "online_dpo", "num_noise_levels": 1},
]


def documented() -> set[str]:
    """First cells such as "`actor/ratio_mean`, `ratio_std`": what has no folder has the one before's."""
    names: set[str] = set()
    for cell in re.findall(r"^\| (`.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", cell):
            folder = name.rpartition("/")[0] if "/" in name else folder
            names.add(f"{folder}/{name.rpartition('/')[2]}")
    return names


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda part: part["name"])
def test_every_metric_is_documented(
    algorithm: dict[str, Any], tiny_qwen_image: Path, ranks: Ranks, files: SyncBlobs, tmp_path: Path
) -> None:
    spec = make_spec(tiny_qwen_image, algorithm=algorithm)
    metrics = make_worker(spec, ranks, files, tmp_path).train(Drawer(spec).draw(files, 0)).metrics
    assert set(metrics) - documented() == set()
