"""Models whose requests belong together: sequences, each on one instance, one request after the other."""
