"""A loaded model: its programs, its memory layout, the sizes compiled while it serves."""
