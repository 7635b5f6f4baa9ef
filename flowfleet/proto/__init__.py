"""Generated from protos/flowfleet/v1 by `make protos`. Do not edit."""
