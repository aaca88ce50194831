"""Post-processes other models' outputs: Python models that `preprocess` adds, and names of public classes."""

PREPROCESS = "preprocess"
"""The parameter of a model that names a preset."""
NAMES = ("imagenet", "inception", "yolov4", "yolov5", "yolov8", "yolo_end2end")
