"""Probes of a stack's processes: does one serve, does it still answer? Each asks once and never raises."""

from __future__ import annotations

import ssl

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
    try:
        if process.kind is Kind.REDIS:
            with redis.Redis.from_url(plan.redis_url, protocol=2, retry=None, socket_timeout=timeout_s) as client:
                return bool(client.ping())
        if process.kind is Kind.CONTROLLER:
            trusted = ssl.create_default_context(cafile=plan.ca) if plan.ca else True
            answer = httpx.get(f"{plan.url}{path}", timeout=timeout_s, trust_env=False, verify=trusted)
            return answer.status_code == httpx.codes.OK
        return grpc_serves(process.probe or process.address, timeout_s)
    except redis.ResponseError as error:
        return not str(error).startswith("BUSY")  # full, or its disk is: others say so. Busy is a script without an end
    except (redis.RedisError, httpx.HTTPError, grpc.RpcError):
        return False


def grpc_serves(address: str, timeout_s: float) -> bool:
    """Returns True if a service takes work. Raises grpc.RpcError where it does not answer."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
