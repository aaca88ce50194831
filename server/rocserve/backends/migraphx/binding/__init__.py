"""Puts MIGraphX behind one small interface, over its C API or its official Python module."""
