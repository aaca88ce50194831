"""Runs bare engines in separate processes and times them: for `bench`, `tune` and `compile --compare`."""
