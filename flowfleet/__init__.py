"""What every Flowfleet service shares. Importing this package must not import torch."""
