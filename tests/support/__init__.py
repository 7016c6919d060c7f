"""What tests share: types to probe with, tables of claims, and how a run is divided.

contexts          a context of MLIR for many programs
arrays            constants of test modules that compile nothing
array_types       implicit arrays, and when two trees agree
probes            types that refuse to be dense, or to lose their metadata
matrix            the table of probes by transformations
claims            the table of a type's operations by transformations
implicit_weights  implicit arrays in the place of a layer's weights
jax_functions     arguments for every public function of JAX
meshes            a mesh of eight devices, and values that say how they are cut
gguf_files        GGUF files of random blocks
stored_values     what a QArray stands for, found by NumPy alone
every_type        a value of every array type, in any floating dtype
fixed_examples    examples of properties that are the same in every run
annotations       whether they are checked in this run
policies          what to make of an operand that is made dense
selection         which cases of each test a run has
durations.json    the seconds of one case of each test that takes long
environment       the environment variables of a run
memory            how many workers a run starts, and when they release memory
plain_english     words that make a text hard to read, and the texts that users see
optional          skips for libraries that are not installed
"""
