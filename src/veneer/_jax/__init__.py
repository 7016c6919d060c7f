"""Adapters to private JAX: the only package that imports `jax._src`.

Public names are imported from their public modules. The exception is `jax.extend.core`: importing
it imports Pallas, which takes as long as all of veneer. Code for one version of JAX names the
version, so that it can be deleted with the support for that version.

    tracing             the current trace; types, manual axes and known entries of traced arrays
    primitives          lookup of primitives, jaxprs, scans, shardings, lowering of primitives
    derivatives         custom derivatives and batching rules, and a named scope for tangents
    frames              the user's source line, and notes on errors that functions of JAX raise
    export              serialization of metadata for `jax.export`
    hijax               names for high types; imported only by programs that use high types
"""
