"""Residency: models that are registered and loaded by their first request."""
