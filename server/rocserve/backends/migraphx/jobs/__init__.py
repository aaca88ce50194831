"""Runs MIGraphX in child processes: compiling, probing, inspecting. A child is started as the job's module."""
