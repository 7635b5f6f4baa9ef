"""What the chart gives and tells pods of NVIDIA GPUs: RDMA resources, and drivers."""

import re
from pathlib import Path

import pytest

from flowfleet.hardware.drivers import OLDEST_DRIVER, RDMA
from tests.deploy.conftest import API_SERVER, CHART, PROFILES, Rendered, container, environment, helm, values_of


def test_pods_with_rdma_know_it() -> None:
    rendered = Rendered("rdma")
    for pod in (rendered.pod("rollout-default"), rendered.trainer["spec"]["template"]):
        assert container(pod)["resources"]["limits"]["rdma/hca"] == 1
        assert environment(pod)[RDMA] == "rdma/hca"


@pytest.mark.parametrize("profile", sorted({*PROFILES} - {"rdma"}))
def test_pods_without_rdma_are_told_of_none(profile: str) -> None:
    for _, pod in Rendered(profile).pods():
        assert RDMA not in environment(pod)


def test_several_rdma_resources_are_one_variable() -> None:
    limits = '{"rdma/a":1,"rdma/b":2,"memory":"1Gi"}'
    pod = Rendered("nvidia", f'rollout.resources={{"limits":{limits}}}').pod("rollout-default")
    assert environment(pod)[RDMA] == "rdma/a,rdma/b"


def test_notes_and_pages_name_the_drivers_that_processes_ask_for() -> None:
    page = (Path(CHART).parents[2] / "docker/README.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| ([\d.]+) \|", page, re.MULTILINE))
    assert {int(cuda): driver for cuda, driver in rows.items()} == OLDEST_DRIVER
    install = ("install", "fleet", str(CHART), "--namespace", "ns", "--dry-run=client", *API_SERVER)
    notes = helm(*install).stdout.partition("\nNOTES:\n")[2]
    assert all(driver in notes for driver in OLDEST_DRIVER.values())
    assert OLDEST_DRIVER[13] not in helm(*install, *values_of("cpu")).stdout
