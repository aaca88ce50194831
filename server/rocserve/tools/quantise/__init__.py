"""`rocserve quantise`: makes a program of PyTorch's compute in whole numbers of 8 bits."""
