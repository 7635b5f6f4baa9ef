"""Checks of a service's answer to Describe."""

import math

import grpc
import grpc.aio

from flowfleet.conformance.checks import Fault, Remark, check, require, said
from flowfleet.conformance.session import Session
from flowfleet.proto.reward_pb2 import MODALITY_UNSPECIFIED, Modality
from flowfleet.rewards.requests import CONTRACT, SERVICE_NAME


@check("reachable", "a gRPC server answers at the address")
async def reachable(session: Session) -> str | None:
    try:
        await session.describe(session.options.connect_s)
    except grpc.aio.AioRpcError as error:
        messages = {
            grpc.StatusCode.DEADLINE_EXCEEDED: f"nothing answered within {session.options.connect_s:g} s: is a gRPC "
            "server at this address, and has it started?",
            grpc.StatusCode.UNAVAILABLE: said(error),
            grpc.StatusCode.UNAUTHENTICATED: f"{said(error)}; the token to send is read from FLOWFLEET_RPC_TOKEN",
        }
        if message := messages.get(error.code()):
            raise Fault(message) from None
    return None


@check("health", 'grpc.health.v1.Health/Check says SERVING for ""', "reachable")
async def health(session: Session) -> str | None:
    try:
        status = await session.health()
    except grpc.aio.AioRpcError as error:
        require(False, f"{said(error)}; add the standard health service: probes of a cluster ask it")
    require(status == "SERVING", f"it says {status}")
    try:
        await session.health(SERVICE_NAME)
    except grpc.aio.AioRpcError as error:
        raise Remark(f"serving, but {SERVICE_NAME} is not known to it: {said(error)}") from None
    return None


@check("describe", "Describe answers with a name and a version", "reachable")
async def describe(session: Session) -> str | None:
    try:
        described = await session.describe()
    except grpc.aio.AioRpcError as error:
        absent = error.code() is grpc.StatusCode.UNIMPLEMENTED
        require(not absent, f"there is no {SERVICE_NAME} of this contract behind the address ({said(error)})")
        require(False, said(error))
    require(described.name, "name is empty")
    require(described.version, "version is empty: it tells which scores may be compared")
    session.described = described
    return f"{described.name} {described.version}"


@check("contract", f"contract is at most {CONTRACT}, the newest that this suite knows; 0 counts as 1", "describe")
async def contract(session: Session) -> str | None:
    number = session.described.contract
    require(
        number <= CONTRACT,
        f"the service speaks contract {number}, this Flowfleet {CONTRACT}: upgrade Flowfleet, or run an older service",
    )
    if number == 0:
        raise Remark("contract is not set, which counts as 1: set it")
    return f"contract {number}"


@check("modalities", "modalities are pictures, videos, texts, sounds or several of them", "describe")
async def modalities(session: Session) -> str | None:
    given = list(session.described.modalities)
    known = set(Modality.values()) - {MODALITY_UNSPECIFIED}
    unknown = [number for number in given if number not in known]
    require(not unknown, f"modality {unknown and unknown[0]} is not known")
    if not given:
        raise Remark("none is named, which counts as pictures: name them")
    return None


@check("score range", "score_min < score_max, ±infinity where there is no bound", "describe")
async def score_range(session: Session) -> str | None:
    low, high = session.described.score_min, session.described.score_max
    require(not math.isnan(low) and not math.isnan(high), f"score_min is {low}, score_max {high}")
    require(low < high, f"score_min is {low:g}, score_max {high:g}")
    return f"{low:g} to {high:g}"


@check("component names", "components are names, each once", "describe")
async def component_names(session: Session) -> str | None:
    names = list(session.described.components)
    require(all(names), "a component has no name")
    twice = next((name for name in names if names.count(name) > 1), "")
    require(not twice, f"{twice!r} is named twice")
    return ", ".join(names) or "no components"


@check("batch limit", "max_batch_size is at least 2 for a service that wants whole groups", "describe")
async def batch_limit(session: Session) -> str | None:
    limit = session.described.max_batch_size
    require(not session.described.needs_group or limit != 1, "max_batch_size is 1: no group fits")
    if limit == 0:
        raise Remark("max_batch_size is 0, which counts as no limit: name one that fits in memory")
    return f"{limit} samples"


@check("describe again", "Describe says the same each time", "describe")
async def stable(session: Session) -> str | None:
    for _ in range(2):
        again = await session.describe()
        if again != session.described:
            fields = [field.name for field in again.DESCRIPTOR.fields]
            changed = [name for name in fields if getattr(again, name) != getattr(session.described, name)]
            require(False, f"changed between calls: {', '.join(changed)}")
    return None
