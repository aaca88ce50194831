"""Which programs a model needs, and all that each depends on."""
