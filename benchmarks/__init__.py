"""Measures rocserve against its peers: a real Triton, and a bare loop over the same engine calls."""
