"""Holds `rocserve tune`, which finds the batch size and number of instances that suit a model on this machine."""
