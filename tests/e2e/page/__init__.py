"""A package, so that its tests share a browser and a server, which end with its last test."""
