"""rocserve's servers as the replicas of a Ray Serve application."""
