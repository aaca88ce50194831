"""The models that a model's parameter `preprocess` stands for: models.py chooses; images.py and texts.py make them.

presets/ has what the generated models run in their workers, and the names that the flag and the parameter take."""
