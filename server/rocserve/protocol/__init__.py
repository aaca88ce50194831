"""The messages of the gRPC services, generated from protos/ by `make protos`. The public clients (tritonclient, kserve)
define the same names in protobuf's default pool, which takes a name only once. These messages have a separate pool, so
that one process can import both, in either order."""
