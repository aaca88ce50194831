"""Front ends in processes of their own: what they and the server tell each other, and who starts and ends them."""
