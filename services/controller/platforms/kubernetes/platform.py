"""A Helm release as a platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from services.controller.platforms.kubernetes.api import PODS
from services.controller.platforms.kubernetes.deletion_cost import ANNOTATION
from services.controller.platforms.kubernetes.directory import KubernetesDirectory
from services.controller.platforms.kubernetes.launcher import KubernetesLauncher
from services.controller.platforms.platform import Platform

if TYPE_CHECKING:
    from services.controller.settings import ControllerSettings


def open_kubernetes(settings: ControllerSettings, registry: CollectorRegistry) -> Platform:
    assert settings.trainer_template is not None
    release, namespace = settings.kubernetes, settings.namespace
    directory = KubernetesDirectory(release, namespace, registry)
    launcher = KubernetesLauncher(directory, release, namespace, settings.trainer_template, settings.owner)

    async def set_cost(pod: str, cost: int) -> None:
        await directory.api.patch(PODS, pod, {"metadata": {"annotations": {ANNOTATION: str(cost)}}})

    return Platform(directory, launcher, set_cost)
