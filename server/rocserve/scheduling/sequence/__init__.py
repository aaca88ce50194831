"""Schedules the requests of sequences: each sequence runs on one instance, one request after the other."""
