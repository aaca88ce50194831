"""Runs ensembles, members chained by their tensors, in the server's process."""
