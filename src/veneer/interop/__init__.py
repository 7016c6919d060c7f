"""Bridges to other libraries and to files; each imports what it needs when it is first used."""
