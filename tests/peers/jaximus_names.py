"""A pytest plugin that runs eformer's array types and tests on `veneer.interop.jaximus`."""

import sys

import veneer.interop.jaximus as jaximus

sys.modules["eformer.jaximus"] = jaximus
