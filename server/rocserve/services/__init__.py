"""Answers clients' calls independently of transports: messages in, messages out."""
