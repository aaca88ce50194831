"""The verb `rocserve get`: fetches the weights of the sample repository's models, or builds untrained ones."""
