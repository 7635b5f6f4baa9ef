"""Library that all Flowfleet services share. Importing this package must not import torch."""
