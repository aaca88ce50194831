"""The other verbs of the command `rocserve`: one module a verb."""
