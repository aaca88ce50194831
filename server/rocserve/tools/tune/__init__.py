"""`rocserve tune`: which batch size and how many instances suit a model on this machine."""
