"""What is done in a child process of its own, which may be killed: compiling, probing, inspecting, exporting."""
