"""Makes the models for the parameter `preprocess`: models.py chooses the preset; images.py and texts.py make them.

presets/ has the code of the generated models, and the names that the flag and the parameter accept."""
