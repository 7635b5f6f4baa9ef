"""Names the new place of a removed package, for one release."""

raise ImportError("flowfleet.client.aio was removed: import AsyncClient from flowfleet.client")
