"""The control plane: finds the models of the repositories, loads, swaps and unloads them."""
