"""The Python client of the REST API, what it answers, and archives of ended jobs."""

from flowfleet.api.problems import ApiError
from flowfleet.client.asynchronous import AsyncClient
from flowfleet.client.client import Client

__all__ = ["ApiError", "AsyncClient", "Client"]
