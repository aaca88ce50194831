"""Serves the counters of all models to monitoring, as text over HTTP."""
