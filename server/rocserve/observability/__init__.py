"""What operators see: logs (and, later, traces)."""
