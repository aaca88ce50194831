"""From what a client sends to an image in memory: JPEG, PNG and raw pixels, their limits and their faults."""
