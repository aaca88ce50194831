"""Holds `rocserve quantise`, which makes a PyTorch program compute in 8-bit integers."""
