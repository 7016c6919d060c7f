"""Names of Quax that may change or go: those of its main branch since 0.4.6.

hijax           `HiValue` and `register_rules`: a Quax type whose leaf is a value of hijax
"""
