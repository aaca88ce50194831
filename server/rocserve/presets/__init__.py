"""The Python models that `preprocess` makes beside another one: post-processing in Python, names of public classes."""

PREPROCESS = "preprocess"
"""The parameter of a model that names one of these."""
NAMES = ("imagenet", "inception", "yolov4", "yolov8")
