"""Answers what clients ask of the server, independent of transports: messages in, messages out."""
