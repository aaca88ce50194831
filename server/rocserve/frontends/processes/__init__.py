"""Front ends in processes of their own: their link to the server, and their supervision."""
