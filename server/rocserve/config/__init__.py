"""Model configurations: reads, completes and validates them without an engine or the network."""
