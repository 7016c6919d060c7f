"""A pytest plugin that runs eformer's array types and tests on `veneer.interop.jaximus`."""

import veneer.interop.jaximus as jaximus

jaximus.replace_jaximus()
