"""How many replicas a pool needs, told to KEDA."""
