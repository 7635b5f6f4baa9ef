"""Names the new place of a removed module, for one release."""

raise ImportError("flowfleet.client.overview was removed: import flowfleet.api.overview")
