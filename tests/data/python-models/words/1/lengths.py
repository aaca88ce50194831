import numpy as np


def lengths_of(texts):
    return np.array([len(text) for text in texts.flatten()], dtype=np.int64).reshape(texts.shape)
