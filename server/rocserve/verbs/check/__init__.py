"""The verb `check`: whether an engine computes a model, and the first operator that it computes differently."""
