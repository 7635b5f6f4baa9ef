"""Probes of a stack's processes: does one serve, does it still answer? Each asks once and never raises."""

from __future__ import annotations

import grpc
import httpx
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowfleet.local.plan import Kind, Plan, ProcessPlan

PROBE_TIMEOUT_S = 2.0


def serves(process: ProcessPlan, plan: Plan) -> bool:
    """Returns True if the process takes work. Asks in the way of its kind, for at most `PROBE_TIMEOUT_S`."""
    return _asked(process, plan, "/readyz", PROBE_TIMEOUT_S)


def is_alive(process: ProcessPlan, plan: Plan, timeout_s: float) -> bool:
    """Returns False if killing and restarting the process would help."""
    return _asked(process, plan, "/healthz", timeout_s)


def _asked(process: ProcessPlan, plan: Plan, path: str, timeout_s: float) -> bool:
    if process.kind is Kind.REDIS:
        return _redis_serves(plan.redis_url, timeout_s)
    if process.kind is Kind.CONTROLLER:
        return _http_serves(f"{plan.url}{path}", timeout_s)
    return _grpc_serves(process.address, timeout_s)


def _redis_serves(url: str, timeout_s: float) -> bool:
    try:
        with redis.Redis.from_url(url, protocol=2, retry=None, socket_timeout=timeout_s) as client:
            return bool(client.ping())
    except redis.ResponseError as error:
        return not str(error).startswith("BUSY")  # full, or its disk is: others say so. Busy is a script without an end
    except redis.RedisError:
        return False


def _http_serves(url: str, timeout_s: float) -> bool:
    try:
        return httpx.get(url, timeout=timeout_s, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _grpc_serves(address: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
