"""Repositories elsewhere: buckets, Hugging Face, archives. Each is kept as a copy, which is served like a folder."""
