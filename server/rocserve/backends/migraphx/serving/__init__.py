"""Serves a loaded model: its programs, its memory layout, the batch sizes compiled while it serves."""
