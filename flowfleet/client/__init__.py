"""The Python client of the REST API, what it answers, and archives of ended jobs."""

from flowfleet.client.asynchronous import AsyncClient
from flowfleet.client.client import Client
from flowfleet.client.types import ApiError

__all__ = ["ApiError", "AsyncClient", "Client"]
