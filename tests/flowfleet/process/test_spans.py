"""A failed span says what kind of failure it was, without any words of it."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install -e '.[traces]'")

from flowfleet.process.spans import Tracer
from flowfleet.rpc import calls

SECRET = "the judge said: a cat in my prompt"
PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


class Refused(grpc.aio.AioRpcError):
    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), grpc.aio.Metadata(), details=SECRET)


class Call:
    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return SECRET


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> tuple[Tracer, list[Any]]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracer, ended = Tracer("test", "grpc"), list[Any]()
    monkeypatch.setattr(tracer, "_processor", type("Kept", (), {"on_end": staticmethod(ended.append)}))
    return tracer, ended


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ValueError(SECRET), "ValueError"), (Refused(), "INVALID_ARGUMENT"), (KeyError(SECRET), "KeyError")],
)
def test_an_error_is_told_by_its_kind(sent: tuple[Tracer, list[Any]], error: Exception, kind: str) -> None:
    tracer, ended = sent
    with pytest.raises(type(error)), tracer.serving("Score", PARENT, {}):
        raise error
    (span,) = ended
    assert (span.status.is_ok, span.status.description) == (False, kind)
    assert SECRET not in span.to_json()


@pytest.mark.anyio
async def test_a_failed_call_is_told_by_its_code(sent: tuple[Tracer, list[Any]]) -> None:
    tracer, ended = sent
    with tracer.serving("Score", PARENT, {}):
        span = tracer.call("Score", {})
        assert span is not None
    await calls._end(tracer, span, Call(), 1)
    assert ended[-1].status.description == "UNAVAILABLE"
