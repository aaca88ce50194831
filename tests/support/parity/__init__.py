"""One request to a real Triton and to rocserve on the same models, and their answers side by side."""
