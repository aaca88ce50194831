"""What a model's configuration asks of MIGraphX."""
