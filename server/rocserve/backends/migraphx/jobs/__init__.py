"""The jobs with MIGraphX: compiling, probing, inspecting. A child that does one is called as the module of the job."""
