"""gRPC as every service speaks it; who may call what; mutual TLS."""
