"""Compiled programs on disk, named by what they depend on, shared by all servers of a machine."""
