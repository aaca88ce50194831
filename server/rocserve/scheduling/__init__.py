"""Schedulers: between a validated request and the instance that runs it."""
