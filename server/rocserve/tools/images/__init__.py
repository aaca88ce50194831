"""The verbs that ask a running server about images: classify and detect."""
