"""What monitoring asks: the counters of all models, as text over HTTP."""
