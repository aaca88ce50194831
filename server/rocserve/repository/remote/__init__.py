"""Remote repositories: buckets, Hugging Face, archives. Each is copied into a local folder, which is served."""
