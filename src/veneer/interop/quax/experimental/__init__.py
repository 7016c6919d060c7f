"""The names that Quax's main branch has added since version 0.4.6. They may change or be removed.

hijax           `HiValue` and `register_rules`: a Quax type whose leaf is a value of hijax
"""
