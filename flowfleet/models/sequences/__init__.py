"""Models that write tokens: the `SequenceAdapter`, and the parts that its families share."""
