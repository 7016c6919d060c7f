"""Shared parts of the tests: array types, tables of claims, and settings of test runs.

contexts          one MLIR context for many programs
arrays            constants of test modules that compile nothing
array_types       implicit arrays, and when two trees agree
probes            types that cannot be materialized, or must keep their metadata
matrix            tests of every probe under every transformation
claims            tests of the operations of a type under every transformation
implicit_weights  implicit arrays for the weights of a layer
jax_functions     arguments for every public function of JAX
meshes            meshes of eight devices, and values with a sharding
transformer       a transformer in plain JAX, with implicit or handwritten LoRA weights
data_parallel     a decoder that is trained on 8 devices, and the bytes that are sent
planned_decoder   a decoder that is split as `veneer plan` says, and its bytes
call_paths        the functions that run in a call
operations        the operations of `vn.quant`, with their dense counterparts
qwix_arrays       conversion between QArray and the arrays of Qwix
gguf_files        GGUF files of random blocks
stored_values     the dense array of a QArray, computed by NumPy alone
every_type        a value of every array type, in any floating dtype
fixed_examples    Hypothesis examples that are the same in every run
annotations       a skip for runs that check annotations
policies          policies for operands that are materialized
selection         the choice of the cases of each test in a run
durations.json    the seconds of one case of each test that takes long
environment       the environment variables of a run
memory            the number of workers, and the memory of each
plain_english     a search for words that make a text hard to read
optional          skips for libraries that are not installed
"""
