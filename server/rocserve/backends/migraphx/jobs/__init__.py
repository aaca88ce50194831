"""Runs MIGraphX in child processes: compiling, probing, inspecting. Each child process runs `child.py`."""
