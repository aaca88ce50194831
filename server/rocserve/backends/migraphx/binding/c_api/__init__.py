"""MIGraphX through its C API (libmigraphx_c.so.3) with ctypes: any Python, and the GIL is released during each call."""
