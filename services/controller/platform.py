"""Where the fleet runs, from the settings: processes of this machine, or pods of a Helm release."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.controller.fleet.directory import Directory
from services.controller.platforms.launcher import Launcher
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.platforms.local.launcher import LocalLauncher
from services.controller.scaling.deletion_cost import ANNOTATION, SetCost
from services.controller.settings import ControllerSettings


@dataclass(frozen=True)
class Platform:
    directory: Directory
    launcher: Launcher
    set_deletion_cost: SetCost | None = None
    """Sets the deletion cost of a rollout's pod; None if pools are not scaled in."""


def open_platform(settings: ControllerSettings, registry: CollectorRegistry) -> Platform:
    """Start its directory before use, and stop it in the end. Raises ValueError for what cannot work."""
    if settings.kubernetes:
        return _kubernetes(settings, registry)
    return Platform(
        StaticDirectory(settings.rewards, settings.rewards_file),
        LocalLauncher(settings.state_dir, settings.trainer_python, settings.trainer_devices, settings.trainers),
    )


def _kubernetes(settings: ControllerSettings, registry: CollectorRegistry) -> Platform:
    """Its client is large: it is imported only where it is used."""
    from services.controller.platforms.kubernetes.api import PODS
    from services.controller.platforms.kubernetes.directory import KubernetesDirectory
    from services.controller.platforms.kubernetes.launcher import KubernetesLauncher

    assert settings.trainer_template is not None
    release, namespace = settings.kubernetes, settings.namespace
    directory = KubernetesDirectory(release, namespace, registry)
    launcher = KubernetesLauncher(directory, release, namespace, settings.trainer_template, settings.owner)

    async def set_cost(pod: str, cost: int) -> None:
        await directory.api.patch(PODS, pod, {"metadata": {"annotations": {ANNOTATION: str(cost)}}})

    return Platform(directory, launcher, set_cost)
