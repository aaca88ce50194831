"""Links between two processes: front end <-> server, server <-> worker. README.md explains them."""
