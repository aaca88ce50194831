"""A folder on the sys.path of Python models, for processes that they start by multiprocessing's "spawn"."""
