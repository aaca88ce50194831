"""The messages of the gRPC services, made from protos/ by `make protos`.

The public clients (tritonclient, kserve) define the same names in protobuf's default pool, which takes a name only
once. Ours live in a pool of their own, so both can be imported in one process, in either order.
"""
