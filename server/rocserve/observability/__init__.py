"""What operators see: the log and traces."""
