"""What operators see: logs (and, later, metrics and traces)."""
