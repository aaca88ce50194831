"""Traces of single requests: which are chosen, what is written down of them, and where it goes."""
