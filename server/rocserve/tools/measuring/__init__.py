"""Runs bare engines in processes of their own and times them: for `bench`, `tune` and `compile --compare`."""
