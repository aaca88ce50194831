"""The control plane: what is in the model repository, and what of it is loaded."""
