"""The data plane: its loop, and memory that processes share, heaps of tensors, links of messages, doorbells.

Anonymous files carry the arenas of `rocserve.workers`. Heaps and links are made for front ends in processes of their
own (docs/architecture.md, "What comes"), and nothing else uses them yet.
"""
