"""Products with stored matrices, by the fastest means that a platform has."""
