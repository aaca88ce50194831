"""The samples that int8 and fp8 are calibrated with."""
