"""`rocserve bench`: the bare engine's times, and those of others in turns with it."""
