"""rocserve's servers as replicas of a Ray Serve application."""
