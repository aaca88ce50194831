"""The log and the traces, which operators read."""
