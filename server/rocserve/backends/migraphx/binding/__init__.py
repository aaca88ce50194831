"""MIGraphX behind one small interface, over its C API or over its official Python module."""
