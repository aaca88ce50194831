"""Traces of single requests: which are chosen, and where they are written."""
