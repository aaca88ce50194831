"""Holds the other verbs of the command `rocserve`, one module for each."""
