"""A regular package, as rocAL's is: without this file Python would import an installed `amd` instead."""
