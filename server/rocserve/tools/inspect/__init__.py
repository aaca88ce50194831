"""`rocserve inspect`: what MIGraphX makes of a model."""
