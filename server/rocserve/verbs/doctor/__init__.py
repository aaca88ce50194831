"""Holds `rocserve doctor`, which checks the installation and each engine, and gives advice."""
