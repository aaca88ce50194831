"""A package of its own, as rocAL's is: without this file an installed `amd` would be found in its place."""
