"""Read the offsets of struct members from XLA's C header for FFI.

JAX ships the header that its XLA was built with (`xla/ffi/api/c_api.h`). Native code reads a call
from XLA by these offsets, without a C compiler. If the header lacks a member, this module raises.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import jax

#: The version of the interface that `xla_calls.py` is written for. XLA raises the major version
#: with each incompatible change.
MAJOR_VERSION = 0

#: The members of each struct that `xla_calls.py` reads or writes.
MEMBERS = {
    "XLA_FFI_CallFrame": "extension_start api ctx args.size args.args rets.size rets.rets",
    "XLA_FFI_Buffer": "dtype data rank dims",
    "XLA_FFI_Api": "XLA_FFI_Error_Create XLA_FFI_Error_Destroy XLA_FFI_ThreadPool_Schedule "
    "XLA_FFI_ThreadPool_NumThreads",
    "XLA_FFI_Error_Create_Args": "struct_size extension_start message errc",
    "XLA_FFI_Error_Destroy_Args": "struct_size extension_start error",
    "XLA_FFI_ThreadPool_Schedule_Args": "struct_size extension_start ctx task data",
    "XLA_FFI_ThreadPool_NumThreads_Args": "struct_size extension_start ctx num_threads",
    "XLA_FFI_Metadata_Extension": "extension_base.type metadata",
    "XLA_FFI_Metadata": "api_version.major_version api_version.minor_version traits",
}
#: The enumerators that it uses.
ENUMERATORS = (
    "XLA_FFI_Extension_Metadata XLA_FFI_DataType_F32 XLA_FFI_DataType_S8 XLA_FFI_DataType_U8 "
    "XLA_FFI_DataType_F16 XLA_FFI_DataType_BF16 XLA_FFI_DataType_F8E8M0FNU "
    "XLA_FFI_Error_Code_INVALID_ARGUMENT XLA_FFI_Error_Code_RESOURCE_EXHAUSTED"
).split()

#: Sizes of C types and of pointers in bytes. Each is aligned to its size.
_SIZES = {"size_t": 8, "int64_t": 8, "int32_t": 4, "uint32_t": 4, "int": 4, "*": 8}


class Header:
    """The structs and enumerators of a header.

    **Raises:** `ValueError` if a member or enumerator that native code needs is missing.

    >>> from veneer.native.ffi_header import header
    >>> header().offset("XLA_FFI_CallFrame", "api")
    16
    """

    def __init__(self, text: str):
        text = re.sub(r"//.*|/\*.*?\*/", "", text)
        self._structs = dict(re.findall(r"struct (\w+) \{(.*?)^\}", text, re.DOTALL | re.MULTILINE))
        self._types = dict.fromkeys(re.findall(r"enum \{[^}]*\} (\w+);", text), "int")
        self._types |= {new: old for old, new in re.findall(r"typedef (\w+) (\w+);", text)}
        self._values = {k: int(v) for k, v in re.findall(r"^ *(\w+) = (\d+)", text, re.MULTILINE)}
        numbers = re.findall(r"#define XLA_FFI_API_M\w+ (\d+)", text)
        self.major_version, self.minor_version = map(int, numbers) if len(numbers) == 2 else (-1, 0)
        if self.major_version != MAJOR_VERSION:
            raise ValueError(f"the header has version {'.'.join(numbers)}, not {MAJOR_VERSION}")
        for struct, members in MEMBERS.items():
            for member in members.split():
                self.offset(struct, member)
        for name in ENUMERATORS:
            self.value(name)

    def offset(self, struct: str, member: str) -> int:
        """Return the offset in bytes of a member, or of a member's member: `"args.size"`."""
        member, _, nested = member.partition(".")
        for name, type, offset, _ in self._members(struct):
            if name == member:
                return offset + (self.offset(type, nested) if nested else 0)
        raise ValueError(f"the header has no {struct} with {member}")

    def size(self, struct: str) -> int:
        """Return the size of a struct as XLA defines it: the end of its last member."""
        return max(offset + size for _, _, offset, size in self._members(struct))

    def value(self, enumerator: str) -> int:
        """Return the number of an enumerator."""
        if enumerator not in self._values:
            raise ValueError(f"the header has no {enumerator}")
        return self._values[enumerator]

    def _members(self, struct: str) -> Iterator[tuple[str, str, int, int]]:
        """Yield the name, type, offset and size of each member, aligned as by a C compiler."""
        end = 0
        for declaration in self._structs.get(struct, "").split(";")[:-1]:
            *specifiers, name = re.findall(r"\w+|\*", declaration)
            is_pointer = "*" in specifiers or specifiers == ["_XLA_FFI_API_STRUCT_FIELD"]
            type = "*" if is_pointer else specifiers[-1]
            size, alignment = self._size_and_alignment(type)
            start = -(-end // alignment) * alignment
            end = start + size
            yield name, type, start, size

    def _size_and_alignment(self, type: str) -> tuple[int, int]:
        type = self._types.get(type, type)
        if type not in self._structs:
            if type not in _SIZES:
                raise ValueError(f"the header has the unknown type {type}")
            return _SIZES[type], _SIZES[type]
        # All structs of XLA begin with their size, so they are aligned to 8.
        return -(-self.size(type) // 8) * 8, 8


@functools.cache
def header_text() -> str:
    """Return the text of the header that JAX ships.

    **Raises:** `OSError` if JAX ships none.
    """
    return (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text("utf-8")


@functools.cache
def header() -> Header:
    """Return the parsed header that JAX ships.

    **Raises:** `OSError` if JAX ships none, and `ValueError` if native code cannot use it.
    """
    return Header(header_text())
