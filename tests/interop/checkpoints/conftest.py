# A program for an environment of its own, and no test.
collect_ignore = ["make_references.py"]
