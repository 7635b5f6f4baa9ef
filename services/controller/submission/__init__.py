"""Between submit and the first step: what the controller checks of a job, and the data that it opens."""
