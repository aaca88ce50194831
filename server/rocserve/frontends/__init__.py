"""What clients talk to: gRPC (and, later, HTTP and metrics)."""
