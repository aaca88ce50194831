"""Models that are registered, and loaded when they are asked for."""
