"""What tests of several layers share: a server process, and small models."""
