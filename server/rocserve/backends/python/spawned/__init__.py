"""On the sys.path of Python models, for the processes that they start by multiprocessing's "spawn"."""
