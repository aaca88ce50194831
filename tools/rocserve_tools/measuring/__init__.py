"""Times a model's engine in workers: for `bench`, `tune` and `compare`."""
