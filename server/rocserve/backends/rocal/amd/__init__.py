"""Pipelines on amd.rocal, on an AMD GPU or on rocAL's own CPU mode, for machines that have it.

Images are decoded by `decoding/`, on threads, and handed to rocAL as pixels: that way an image that is damaged, or of
a kind that rocAL cannot read, fails alone or is simply read, where rocAL would answer with another image's pixels.
"""
