"""`rocserve doctor`: checks the installation and each engine, and advises."""
