"""What clients talk to: gRPC, HTTP and metrics."""
