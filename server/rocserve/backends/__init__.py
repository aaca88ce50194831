"""Holds the backends, one folder each, which the registry finds by listing the folders."""

from __future__ import annotations
