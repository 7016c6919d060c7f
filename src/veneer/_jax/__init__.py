"""Adapters to private JAX: the only package that imports `jax._src`.

Public names are imported from their public modules. The exception is `jax.extend.core`: importing
it imports Pallas, which takes as long as all of veneer. Code for one version of JAX names the
version, so that it can be deleted with the support for that version.

    tracing             the current trace, kinds of traced arrays, and varying manual axes
    known_values        entries, zeros and divisors of traced arrays that are known at trace time
    primitives          lookup of primitives, jaxprs, scans, shardings, and the lowering of primitives
    derivatives         custom derivatives and batching rules, and a named scope for tangents
    source_lines        the user's source line, without veneer's own frames
    caller_errors       notes on errors of JAX for implicit arrays outside `implicit`
    export              serialization of metadata for `jax.export`
    hijax               names for high types; imported only by programs that use high types
"""
