"""Reads and writes tensors in clients' shared memory: files of /dev/shm, and GPU memory."""
