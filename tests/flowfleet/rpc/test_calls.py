"""Spans of calls, by real servers and channels on loopback, sent to a collector as a service sends them."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from flowfleet import errors
from flowfleet.extras import pip_install
from flowfleet.process import spans, traces
from flowfleet.process.traces import StepIds
from flowfleet.proto import common_pb2, reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from flowfleet.rpc import endpoint as rpc
from tests.collector import Collector, Seen, collector, http_collector
from tests.serving import listening

DESCRIBE, GENERATE = "flowfleet.v1.RewardService/Describe", "flowfleet.v1.RolloutService/Generate"
CLIENT, SERVER = 3, 2
IDS = StepIds.of("job", 7)


class Waits(Exception):
    """Says that a command must wait."""


class Services(reward_pb2_grpc.RewardServiceServicer, rollout_pb2_grpc.RolloutServiceServicer):
    """Answers with the context that it is called in."""

    refuses = False

    async def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        if self.refuses:
            raise errors.Conflict("not now: ask later")
        return reward_pb2.DescribeResponse(name=traces.traceparent())

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateEvent]:
        for index in range(2):
            if self.refuses:
                await asyncio.sleep(60)
            place = common_pb2.SampleId(step=7, group=3, index=index)
            yield rollout_pb2.GenerateEvent(sample=common_pb2.Sample(id=place, traceparent=traces.traceparent()))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        yield made
        traces.stop()


@asynccontextmanager
async def serving(servicer: Services) -> AsyncIterator[grpc.aio.Channel]:
    async with listening(rpc.make_server(), servicer) as address, rpc.open_channel(address) as channel:
        yield channel


async def describe(channel: grpc.aio.Channel) -> str:
    stub = reward_pb2_grpc.RewardServiceStub(channel)
    return (await stub.Describe(reward_pb2.DescribeRequest(), timeout=5)).name


async def generate(channel: grpc.aio.Channel) -> list[common_pb2.Sample]:
    call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(rollout_pb2.GenerateRequest(), timeout=5)
    return [event.sample async for event in call]


def started() -> Any:
    traces.start("test")
    tracer = traces.tracer()
    assert tracer is not None
    return tracer


def pair(seen: Collector, name: str) -> tuple[Seen, Seen]:
    """The one span of a call at its caller, and the one at its server."""
    (client,), (server,) = ([span for span in seen.named(name) if span.kind == kind] for kind in (CLIENT, SERVER))
    return client, server


async def test_a_call_of_each_kind_is_a_span_at_both_ends(seen: Collector) -> None:
    told: list[str] = []
    tracer = started()
    async with serving(Services()) as channel:
        with tracer.command(IDS, "Outer", {"flowfleet.step": 7}, Waits):
            name = await describe(channel)
            samples = await generate(channel)
            traces.link(samples)
            told.extend([name, *(sample.traceparent for sample in samples)])
        assert await describe(channel) == ""  # outside of a step: a poll
    traces.stop()
    (outer,) = seen.named("Outer")
    assert (outer.trace, outer.parent) == (IDS.trace_hex, f"{IDS.span:016x}")
    assert len(seen.spans) == 5
    for name in (DESCRIBE, GENERATE):
        client, server = pair(seen, name)
        assert (client.trace, client.parent) == (outer.trace, outer.span)
        assert (server.trace, server.parent) == (outer.trace, client.span)
        assert client.start_ns <= server.start_ns <= server.end_ns
        assert not client.error
    described, generated = pair(seen, DESCRIBE)[1], pair(seen, GENERATE)[1]
    assert told == [f"00-{one.trace}-{one.span}-01" for one in (described, generated, generated)]
    (link,) = outer.links
    assert (link.trace, link.span, link["samples"]) == (generated.trace, generated.span, "3/0 3/1")


async def test_failed_and_abandoned_calls_say_so(seen: Collector) -> None:
    tracer, servicer = started(), Services()
    servicer.refuses = True
    async with serving(servicer) as channel:
        with pytest.raises(grpc.aio.AioRpcError), tracer.command(IDS, "Failed", {}, Waits):
            await describe(channel)
        with tracer.command(IDS, "Outer", {}, Waits):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(generate(channel), 0.3)
            await asyncio.sleep(0.2)
    traces.stop()
    (refused, refusing), (left, leaving) = pair(seen, DESCRIBE), pair(seen, GENERATE)
    assert [span.error for span in seen.named("Failed")] == [refused.error]
    assert refused.error == "FAILED_PRECONDITION"
    assert refusing.error == "Conflict"
    assert left.error.startswith("CANCELLED")
    assert leaving.error.startswith("CancelledError")


def test_a_command_that_waits_is_not_sent_and_one_that_fails_is(seen: Collector) -> None:
    tracer = started()
    for error in (Waits("later"), ValueError("wrong"), asyncio.CancelledError()):
        with pytest.raises(type(error)), tracer.command(IDS, type(error).__name__, {}, Waits):
            raise error
    traces.stop()
    assert {span.name: span.error for span in seen.spans} == {
        "ValueError": "ValueError",
        "CancelledError": "CancelledError",
    }


def test_the_first_span_of_a_step_has_the_derived_ids(seen: Collector) -> None:
    started().step(IDS, {"flowfleet.step": 7}, start_s=100.0, end_s=107.5)
    traces.stop()
    (span,) = seen.spans
    digest = hashlib.sha256(b"job/7").hexdigest()
    assert (span.trace, span.span, span.parent) == (digest[:32], digest[32:48], "")
    assert (span.start_ns, span.end_ns) == (100 * 10**9, 107_500 * 10**6)
    assert span.service == "flowfleet-test"


def test_http_carries_spans_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_collector() as seen:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", seen.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        started().step(IDS, {}, 1.0, 2.0)
        traces.stop()
        assert [(span.name, span.trace) for span in seen.spans] == [("step", IDS.trace_hex)]


async def test_the_sampler_decides_for_a_whole_step(seen: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace is kept where the lower 64 bits of its id are below the ratio's share of their range."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.3")

    tracer = started()
    async with serving(Services()) as channel:
        for step in range(20):
            with tracer.command(StepIds.of("job", step), "Outer", {}, Waits):
                await describe(channel)
            tracer.step(StepIds.of("job", step), {}, 1.0, 2.0)
    traces.stop()
    ids = [StepIds.of("job", step) for step in range(20)]
    kept = sorted(one.trace_hex for one in ids if one.trace % 2**64 < 0.3 * 2**64)
    assert 0 < len(kept) < 20
    for name in ("step", "Outer"):
        assert sorted(span.trace for span in seen.named(name)) == kept
    assert sorted(span.trace for span in seen.named(DESCRIBE)) == sorted(2 * kept)


def test_without_a_collector_an_end_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(spans, "CLOSE_S", 0.2)
    started().step(IDS, {}, 1.0, 2.0)
    began = time.monotonic()
    traces.stop()
    assert time.monotonic() - began < 2.0


OFF = """
import sys
sys.modules["opentelemetry"] = None  # where it is installed redis-py imports parts of it
from flowfleet.process import traces
from flowfleet.rpc import calls, endpoint
traces.start("test")
assert traces.tracer() is None and calls.of_client("a:1") is None and calls.of_server() == []
assert traces.traceparent() == ""
traces.link([])
"""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_off_is_off(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert not traces.is_on()


def test_off_needs_no_opentelemetry() -> None:
    subprocess.run([sys.executable, "-c", OFF], check=True)


def test_what_cannot_work_is_logged_and_the_service_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    traces.start("test")
    assert traces.tracer() is None
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/json is not supported: set grpc or http/protobuf" in caplog.text
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    traces.start("test")
    assert traces.tracer() is None
    assert pip_install("traces") in caplog.text
