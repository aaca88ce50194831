"""Backends: one folder each. The registry finds them by looking at the folders."""

from __future__ import annotations
