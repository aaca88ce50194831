"""Jobs run in child processes, which may be killed: compiling, probing, inspecting, exporting."""
