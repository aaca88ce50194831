"""Talks to clients: gRPC, HTTP and metrics."""
