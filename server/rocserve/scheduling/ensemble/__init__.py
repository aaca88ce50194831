"""Ensembles: members chained by their tensors, run by the server itself."""
