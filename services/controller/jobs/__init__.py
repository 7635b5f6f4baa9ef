"""Jobs as a whole: submission, the queue of each pool, the scheduler that runs them, quarantine."""
