"""The generated tables of docs/metrics.md: what services export, with the help text that Prometheus shows.

`python -m docs.generate.metrics` rewrites them, in the directory of the repository.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from docs.generate.markdown import rewrite, table
from flowfleet.data.blob_metrics import BlobMetrics
from services.controller.job.shadow_queue import ShadowMetrics
from services.controller.metrics.families import DESCRIPTIONS
from services.controller.rewards.metrics import RewardCalls
from services.reward.judge.metrics import JudgeMetrics
from services.reward.metrics import RewardMetrics
from services.rollout.metrics import RolloutMetrics

PAGE = Path("docs/metrics.md")


class Recorder(CollectorRegistry):
    """A registry that remembers in which order its metrics were made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """See `CollectorRegistry`."""
        self.made.append(collector)
        super().register(collector)


def parts() -> dict[str, str]:
    """Name to content of each generated part of the page."""
    leader = ([name, described.labels, described.text] for name, described in DESCRIPTIONS.items())
    return {
        "leader": _table((str(name), tuple(labels), str(text)) for name, labels, text in leader),
        "calls": _exported(RewardCalls, ShadowMetrics),
        "blobs": _exported(BlobMetrics),
        "rollouts": _exported(RolloutMetrics),
        "rewards": _exported(lambda registry: RewardMetrics("ocr", (0.0, 1.0), registry), JudgeMetrics),
    }


def _exported(*makers: Callable[[CollectorRegistry], object]) -> str:
    registry = Recorder()
    for make in makers:
        make(registry)
    return _table(_row(collector) for collector in registry.made)


def _row(collector: Collector) -> tuple[str, tuple[str, ...], str]:
    (family,) = collector.describe()  # type: ignore[attr-defined]
    labels: tuple[str, ...] = collector._labelnames  # type: ignore[attr-defined]
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.removesuffix(".")
    return name, labels, f"*histogram*: {text}" if family.type == "histogram" else text


def _table(rows: Iterable[tuple[str, tuple[str, ...], str]]) -> str:
    cells = ([f"`{name}`", ", ".join(labels) or "–", text] for name, labels, text in rows)
    return table(["metric", "labels", "meaning"], cells)


if __name__ == "__main__":
    rewrite(PAGE, parts())
