"""Holds the verbs that send images to a running server: classify and detect."""
