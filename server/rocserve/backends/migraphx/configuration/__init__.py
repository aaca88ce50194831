"""Reads a model's configuration for MIGraphX."""
