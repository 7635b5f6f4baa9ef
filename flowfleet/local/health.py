"""Whether a process of the stack serves: one question, asked at most `PROBE_TIMEOUT_S` long, never raising."""

from __future__ import annotations

import grpc
import httpx
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowfleet.local.plan import Kind, Plan, ProcessPlan

PROBE_TIMEOUT_S = 2.0


def serves(process: ProcessPlan, plan: Plan) -> bool:
    """Asks in the way of the process's kind."""
    if process.kind is Kind.REDIS:
        return _redis_serves(plan.redis_url)
    if process.kind is Kind.CONTROLLER:
        return _http_serves(f"{plan.url}/readyz")
    return _grpc_serves(process.address)


def _redis_serves(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, protocol=2, retry=None, socket_timeout=PROBE_TIMEOUT_S) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def _http_serves(url: str) -> bool:
    try:
        return httpx.get(url, timeout=PROBE_TIMEOUT_S, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _grpc_serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
