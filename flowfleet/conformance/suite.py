"""Suite of all checks, run in order against one address."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from flowfleet.conformance import describing, gradients, load, refusing, scoring, sending
from flowfleet.conformance.checks import Check, Fault, Remark, Skip, said
from flowfleet.conformance.report import Report, Result, Service, Status
from flowfleet.conformance.session import Options, Session, open_channel
from flowfleet.proto.reward_pb2 import Modality

_MODULES: Final = (describing, scoring, refusing, sending, gradients, load)
CHECKS: Final = sorted(
    (found for module in _MODULES for found in vars(module).values() if isinstance(found, Check)),
    key=lambda found: found.is_last,
)
"""In the order of their definition."""
_CALLS_OF_A_CHECK: Final = 4
"""Timeouts of a call that a whole check may take."""
_KINDS: Final = {
    Modality.MODALITY_IMAGE: "pictures",
    Modality.MODALITY_VIDEO: "videos",
    Modality.MODALITY_TEXT: "texts",
    Modality.MODALITY_SOUND: "sounds",
}

OnResult = Callable[[Result], object]


def run(address: str, options: Options | None = None, on_result: OnResult | None = None) -> Report:
    """Asks every check of the service at grpc://host:port, grpcs://host:port, or host:port; `on_result` gets each as it
    is known. ValueError for an address or certificates that cannot work."""
    return asyncio.run(check(address, options, on_result))


async def check(address: str, options: Options | None = None, on_result: OnResult | None = None) -> Report:
    """The same inside of an event loop."""
    options = options or Options()
    start = time.monotonic()
    async with open_channel(address, options) as channel:
        session = Session(channel, options)
        results: list[Result] = []
        broken: set[str] = set()
        for rule in CHECKS:
            results.append(await _result(rule, session, broken))
            if on_result is not None:
                on_result(results[-1])
    return Report(address=address, service=_service(session), results=results, seconds=time.monotonic() - start)


async def _result(rule: Check, session: Session, broken: set[str]) -> Result:
    """Adds to `broken` a check that failed, or that was not asked because of one that is broken."""
    start = time.monotonic()
    if lacking := [name for name in rule.needs if name in broken]:
        status, detail = Status.SKIP, f"needs {lacking[0]!r}, which did not pass"
    else:
        status, detail = await _asked(rule, session)
    if lacking or status is Status.FAIL:
        broken.add(rule.name)
    return Result(name=rule.name, rule=rule.rule, status=status, detail=detail, seconds=time.monotonic() - start)


async def _asked(rule: Check, session: Session) -> tuple[Status, str]:
    limit_s = _CALLS_OF_A_CHECK * session.options.timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return Status.PASS, await rule.ask(session) or ""
    except Skip as reason:
        return Status.SKIP, str(reason)
    except Remark as remark:
        return Status.NOTE, str(remark)
    except Fault as fault:
        return Status.FAIL, str(fault)
    except grpc.aio.AioRpcError as error:
        return Status.FAIL, f"a call ended with {said(error)}"
    except TimeoutError:
        return Status.FAIL, f"no end after {limit_s:g} s"


def _service(session: Session) -> Service | None:
    about = session.described
    if not about.name:
        return None
    fields: dict[str, Any] = {name: getattr(about, name) for name in Service.model_fields}
    modalities = [_KINDS.get(number, str(number)) for number in about.modalities] or ["pictures"]
    told = {"contract": about.contract or 1, "modalities": modalities, "components": list(about.components)}
    return Service(**fields | told)
