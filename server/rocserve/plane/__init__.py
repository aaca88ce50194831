"""The data plane: its loop, and memory that processes share: heaps of tensors, links of messages, doorbells, files of
clients that are mapped."""
