"""Runs bare engines in processes of their own and times them: what `bench`, `tune` and `compile --compare` stand on."""
