"""Builds models as large and as costly as published ones, with seeded weights that no training has touched."""
