"""The data plane: its loop, and memory that processes share (heaps of tensors, links, doorbells, clients' files)."""
