"""The Kubernetes API of one namespace, as JSON: the connection of the official client, by its asyncio half, so that a
watch is a task like any other and ends when it is cancelled, and what this service needs of it.

In a pod: the service account, whose token file is read again every minute. Elsewhere: KUBECONFIG.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException

from flowfleet.errors import Conflict, FlowfleetError, NotFound, Unavailable

Object = Mapping[str, Any]

TIMEOUT_S: Final = 20.0
WATCH_S: Final = 120
"""The server ends a watch after so long, so no dead connection stays unnoticed for longer; the next one resumes."""
GONE: Final = 410
TRANSIENT: Final = frozenset({408, 429})


@dataclass(frozen=True)
class Resource:
    """A kind of object: the API's path and the plural in it."""

    group: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        return "/".join(filter(None, (self.group, "namespaces", namespace, self.plural, name)))


PODS: Final = Resource("/api/v1", "pods")
SECRETS: Final = Resource("/api/v1", "secrets")
EVENTS: Final = Resource("/api/v1", "events")
JOBS: Final = Resource("/apis/batch/v1", "jobs")
WORKLOADS: Final = Resource("/apis/kueue.x-k8s.io/v1beta1", "workloads")
ENDPOINT_SLICES: Final = Resource("/apis/discovery.k8s.io/v1", "endpointslices")
DEPLOYMENTS: Final = Resource("/apis/apps/v1", "deployments")


class Gone(FlowfleetError):
    """A watch cannot continue from this version: list again."""


class Refused(RuntimeError):
    """The API server will not do this as things are: RBAC, quota, admission, or a malformed object. The message is its
    own; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class KubernetesApi:
    """Raises Unavailable when no API server answers or it is busy, NotFound, Conflict for what is there already, and
    Refused."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    @property
    def host(self) -> str:
        return str(self._client.configuration.host)

    async def close(self) -> None:
        await self._client.close()

    async def list(self, resource: Resource, selector: str, fields: str = "") -> tuple[list[Object], str]:
        """The objects with these labels and fields, and the version to watch from."""
        answer = await self._ask("GET", resource, query={"labelSelector": selector, "fieldSelector": fields})
        return answer["items"], answer["metadata"]["resourceVersion"]

    async def get(self, resource: Resource, name: str) -> Object:
        found: Object = await self._ask("GET", resource, name)
        return found

    async def create(self, resource: Resource, body: Object) -> Object:
        made: Object = await self._ask("POST", resource, body=body)
        return made

    async def patch(self, resource: Resource, name: str, body: Object) -> Object:
        """A JSON merge patch."""
        patched: Object = await self._ask(
            "PATCH", resource, name, body=body, content_type="application/merge-patch+json"
        )
        return patched

    async def delete(self, resource: Resource, name: str, *, grace_s: int | None = None) -> None:
        """The object stays until what it owns is gone. `grace_s` replaces a pod's own grace period."""
        grace = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        await self._ask("DELETE", resource, name, body={"propagationPolicy": "Foreground", **grace})

    async def watch(self, resource: Resource, selector: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Events after a version as (ADDED | MODIFIED | DELETED | BOOKMARK, object), until the server ends the watch.
        Raises Gone for a version that is too old."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        try:
            response = await self._send("GET", resource, query=query, timeout_s=WATCH_S + TIMEOUT_S)
            async with response:
                if response.status >= 400:
                    raise _problem(resource, response.status, await response.read())
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _problem(resource, event["object"].get("code", 500), json.dumps(event["object"]).encode())
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._away(error) from None

    async def _ask(
        self,
        method: str,
        resource: Resource,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Any:
        try:
            response = await self._send(method, resource, name, query=query, body=body, content_type=content_type)
            async with response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._away(error) from None
        if response.status >= 400:
            raise _problem(resource, response.status, data)
        return json.loads(data)

    async def _send(
        self,
        method: str,
        resource: Resource,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        timeout_s: float = TIMEOUT_S,
    ) -> aiohttp.ClientResponse:
        request = await self._client.param_serialize(
            method,
            resource.path(self._namespace, name),
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=TIMEOUT_S)
        answer = await self._client.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        return response

    def _away(self, error: BaseException) -> Unavailable:
        return Unavailable(f"the Kubernetes API at {self.host} does not answer: {error or type(error).__name__}")


async def connect(namespace: str) -> KubernetesApi:
    """Raises ValueError where there is neither a service account nor a KUBECONFIG."""
    settings = Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=settings)
        else:
            await config.load_kube_config(
                os.environ.get("KUBECONFIG"), client_configuration=settings, persist_config=False
            )
    except (ConfigException, OSError) as error:
        raise ValueError(
            f"--kubernetes: the Kubernetes API is unreachable ({error}): run in a pod with a service account, or set "
            "KUBECONFIG"
        ) from None
    client = ApiClient(configuration=settings)
    client.user_agent = "flowfleet-controller"
    return KubernetesApi(client, namespace)


def _problem(resource: Resource, status: int, data: bytes) -> Exception:
    try:
        message = str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        message = data.decode(errors="replace")[:500]
    if status == GONE:
        return Gone(message)
    if status == 404:
        return NotFound(message)
    if status == 409:
        return Conflict(message)
    if status in TRANSIENT or status >= 500:
        return Unavailable(f"the Kubernetes API: {message}")
    return Refused(f"the Kubernetes API refuses ({status}, {resource.plural}): {message}", status)
