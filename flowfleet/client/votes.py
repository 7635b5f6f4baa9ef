"""Names the new place of a removed module, for one release."""

raise ImportError("flowfleet.client.votes was removed: import flowfleet.api.votes")
