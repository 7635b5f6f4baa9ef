"""Names the new place of a removed module, for one release."""

raise ImportError("flowfleet.client.types was removed: import from flowfleet.api (jobs, samples, rewards, …)")
