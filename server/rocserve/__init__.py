"""rocserve: a model repository server for AMD GPUs, with the same results on a machine without one."""

from __future__ import annotations

__version__ = "0.2.0"
