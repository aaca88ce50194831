"""Holds the verbs of the command `rocserve` except `serve`, a module or a folder for each."""
