"""How many replicas a pool needs, told to KEDA, and which of them may go first."""
