"""Weights with their own rules for products.

product_weights  ProductWeight, the base class
activations      ActivationQuantized, a weight that quantizes the other operand, and its rules
"""
