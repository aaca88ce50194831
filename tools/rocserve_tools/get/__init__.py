"""Holds `rocserve get`, which downloads the models of the sample repository, or builds untrained ones."""
