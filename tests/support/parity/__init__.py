"""Sends one request to a real Triton and to rocserve with the same models, and compares their answers."""
