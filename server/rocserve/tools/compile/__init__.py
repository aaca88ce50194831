"""`rocserve compile`: a model's programs, ahead of the server."""
