"""Runs pipelines on amd.rocal, on an AMD GPU or in rocAL's CPU mode.

Images are decoded by `decoding/`, on threads, and passed to rocAL as pixels. Thus a damaged image fails alone, and
formats that rocAL cannot read work. rocAL itself would return another image's pixels for both.
"""
