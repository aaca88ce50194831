"""Traces of single requests: chooses requests, and writes their traces."""
