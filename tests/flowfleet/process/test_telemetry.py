from __future__ import annotations

import datetime
import json
import logging
import math
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from flowfleet.errors import Unavailable
from flowfleet.process import telemetry

NAMES = [  # names of the field, as the components report them
    "actor/loss", "actor/ppo_kl", "actor/pg_clipfrac_higher", "critic/rewards/std_mean", "critic/advantages/max",
    "perf/throughput", "perf/mfu/actor_infer", "timing_s/update_actor", "timing_per_image_ms/gen",
    "training/off_policy/trajectory_staleness/mean", "val-core/signs/ocr/mean@256",
]  # fmt: skip


def format_line(record: dict[str, Any]) -> dict[str, Any]:
    line = telemetry.JsonFormatter("reward").format(logging.makeLogRecord(record))
    assert "\n" not in line
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_a_log_line_is_json_with_its_context() -> None:
    before = datetime.datetime.now(datetime.UTC)
    record = {"name": "x.y", "levelname": "INFO", "msg": "%s of %d\n“ok”", "args": ("a", 2), "job": "j1", "step": 0}
    line = format_line(record)
    moment = datetime.datetime.fromisoformat(line.pop("ts"))
    assert abs(moment - before) < datetime.timedelta(seconds=5)
    assert line == {
        "level": "info",
        "service": "reward",
        "logger": "x.y",
        "msg": "a of 2\n“ok”",
        "job": "j1",
        "step": 0,
    }


def test_a_traceback_stays_on_the_line_and_odd_values_become_text() -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        line = format_line({"msg": "m", "exc_info": sys.exc_info(), "sample": Exception("odd")})
    assert line["error"].endswith("KeyError: 'lost'")
    assert line["sample"] == "odd"


def test_logs_go_to_stderr_at_the_level() -> None:
    code = (
        "import logging; from flowfleet.process.telemetry import configure_logging; configure_logging('a'); "
        "configure_logging('trainer', 'warning'); logging.getLogger('q').info('no'); "
        "logging.getLogger('q').warning('yes', extra={'step': 4})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = done.stderr.splitlines()
    assert (json.loads(line)["msg"], json.loads(line)["step"], json.loads(line)["service"]) == ("yes", 4, "trainer")
    assert done.stdout == ""


@pytest.mark.parametrize("name", NAMES)
def test_metric_names_are_valid_for_prometheus(name: str) -> None:
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", telemetry.metric_name(name))


def test_metric_names_are_frozen() -> None:
    assert telemetry.metric_name("actor/ppo_kl") == "flowfleet_actor_ppo_kl"
    assert telemetry.metric_name("val-core/signs/ocr/mean@256") == "flowfleet_val_core_signs_ocr_mean_256"
    assert len({telemetry.metric_name(name) for name in NAMES}) == len(NAMES)


def scrape(port: int) -> dict[tuple[str, str], float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, s.labels["job"]): s.value for family in families for s in family.samples if "job" in s.labels}


def test_job_metrics_are_scraped_by_job() -> None:
    registry = CollectorRegistry()
    port = telemetry.start_metrics_server("127.0.0.1", 0, registry)
    metrics = telemetry.JobMetrics(registry)
    metrics.observe("j1", {"actor/loss": 0.25, "timing_s/gen": 2.5})
    metrics.observe("j2", {"actor/loss": math.nan})
    metrics.observe("j1", {"actor/loss": -1.5})
    found = scrape(port)
    assert math.isnan(found.pop(("flowfleet_actor_loss", "j2")))
    assert found == {("flowfleet_actor_loss", "j1"): -1.5, ("flowfleet_timing_s_gen", "j1"): 2.5}
    metrics.keep_only({"j1"})
    assert scrape(port) == found


def test_what_is_of_one_reward_has_it_as_a_label_and_families_go_with_the_last_job() -> None:
    registry = CollectorRegistry()
    metrics = telemetry.JobMetrics(registry)
    metrics.observe("j1", {"critic/rewards/std_mean": 1.0, "critic/rewards/std/mean": 2.0})
    metrics.observe("j1", {"critic/rewards/a-b/mean": 3.0})
    metrics.observe("j2", {"critic/rewards/a_b/mean": 4.0, "val-core/rewards/ocr/missing": 5.0})

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"flowfleet_{name}", labels)

    assert value("critic_rewards_std_mean", job="j1") == 1.0
    assert value("critic_reward_score_mean", job="j1", reward="std") == 2.0
    assert value("critic_reward_score_mean", job="j1", reward="a-b") == 3.0
    assert value("critic_reward_score_mean", job="j2", reward="a_b") == 4.0
    assert value("val_core_reward_score_missing", job="j2", reward="ocr") == 5.0
    metrics.keep_only({"j2"})
    assert {(sample.name, sample.labels["reward"]) for family in registry.collect() for sample in family.samples} == {
        ("flowfleet_critic_reward_score_mean", "a_b"),
        ("flowfleet_val_core_reward_score_missing", "ocr"),
    }
    assert len([*registry.collect()]) == 2
    metrics.keep_only({"j1"})
    assert not [*registry.collect()]
    metrics.observe("j3", {"critic/rewards/a_b/mean": 6.0})
    assert value("critic_reward_score_mean", job="j3", reward="a_b") == 6.0


def test_two_sets_do_not_share_state() -> None:
    registries = [CollectorRegistry() for _ in range(2)]
    first, second = (telemetry.JobMetrics(registry) for registry in registries)
    first.observe("j", {"actor/loss": 1.0})
    second.observe("j", {"actor/loss": 2.0})
    assert [registry.get_sample_value("flowfleet_actor_loss", {"job": "j"}) for registry in registries] == [1.0, 2.0]


def test_a_taken_metrics_port_says_so() -> None:
    port = telemetry.start_metrics_server("127.0.0.1", 0, CollectorRegistry())
    with pytest.raises(Unavailable, match="--metrics-port"):
        telemetry.start_metrics_server("127.0.0.1", port, CollectorRegistry())


def test_timings_sum_by_name_and_count_what_failed() -> None:
    timings = telemetry.Timings()
    with timings("gen"):
        time.sleep(0.02)
    with suppress(KeyError), timings("gen"):
        time.sleep(0.02)
        raise KeyError
    timings.add("reward", 1.5)
    timings.add("reward", 0.5)
    metrics = timings.metrics()
    assert set(metrics) == {"timing_s/gen", "timing_s/reward"}
    assert 0.04 <= metrics["timing_s/gen"] < 1.0
    assert metrics["timing_s/reward"] == 2.0
