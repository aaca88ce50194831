"""What clients talk to: gRPC and metrics (and, later, HTTP)."""
