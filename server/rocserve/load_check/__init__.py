"""Tries a loaded model on made-up inputs before it is served. README.md of this folder explains the decisions."""
