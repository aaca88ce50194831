"""Decodes what a client sends, JPEG, PNG or raw pixels, into an image in memory, with limits and checks."""
