"""The jobs with MIGraphX: compiling, probing, inspecting."""
