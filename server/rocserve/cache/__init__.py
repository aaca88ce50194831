"""Keeps compiled programs on disk: chooses the place, keeps other users out, locks folders in use."""
