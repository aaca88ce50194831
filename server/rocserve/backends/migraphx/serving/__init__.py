"""A loaded model: its programs, its memory layout, what is compiled while it serves."""
