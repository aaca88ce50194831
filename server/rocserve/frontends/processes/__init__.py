"""Front ends in separate processes: their link to the server, and their supervision."""
