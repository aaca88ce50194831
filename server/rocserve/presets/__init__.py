"""What models run that `preprocess` makes beside another one: post-processing in Python, names of public classes."""
