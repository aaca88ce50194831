"""Pre- and post-processes other models' tensors: Python models that `preprocess` adds, and names of public classes."""

PREPROCESS = "preprocess"
"""The parameter of a model that names a preset."""
IMAGES = ("imagenet", "inception", "yolov4", "yolov5", "yolov8", "yolo_end2end")
TEXT = "text"
NAMES = (*IMAGES, TEXT)
"""The presets; config/preprocess makes their models."""
TEXT_FACTS = ("output", "pooling", "normalise", "activation", "max_tokens", "prompt", "matryoshka")
"""The parameters of a text ensemble that describe its answers; they are properties in its metadata."""


def ensemble_name(model: str, preset: str) -> str:
    """Return the name of the ensemble of a model's preset."""
    return f"{model}_{'text' if preset == TEXT else 'image'}"
