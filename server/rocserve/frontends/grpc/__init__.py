"""KServe v2 over gRPC: transports, wire codec and the service itself."""
