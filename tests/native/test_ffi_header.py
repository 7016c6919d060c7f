"""The parser of the FFI header of XLA agrees with a C compiler, and rejects other headers."""

import re
import shutil
import subprocess

import pytest

from veneer.native import ffi_header

HEADER = ffi_header.header_text()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("API_MAJOR 0", "API_MAJOR 1"), "has version 1."),
        (lambda text: text.replace("int64_t* dims;", ""), "has no XLA_FFI_Buffer with dims"),
        (lambda text: text.replace("DataType_F32 =", "DataType_F33 ="), "no XLA_FFI_DataType_F32"),
        (lambda text: text.replace("XLA_FFI_Args args;", "Tuple args;"), "the unknown type Tuple"),
        (lambda text: "", "has version "),
    ],
)
def test_an_unknown_header_raises(change, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        ffi_header.Header(change(HEADER))


def test_offsets_match_a_c_compiler(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    header = ffi_header.header()
    members = [(s, m) for s, members in ffi_header.MEMBERS.items() for m in members.split()]
    assertions = [
        f"_Static_assert(offsetof({s}, {m}) == {header.offset(s, m)}, {f'{s}.{m}'!r});".replace(
            "'", '"'
        )
        for s, m in members
    ]
    assertions += [
        f'_Static_assert({s}_STRUCT_SIZE == {header.size(s)}, "{s}");'
        for s in ffi_header.MEMBERS
        if s.endswith("_Args")
    ]
    assertions += [
        f'_Static_assert({e} == {header.value(e)}, "{e}");' for e in ffi_header.ENUMERATORS
    ]
    source = tmp_path / "layout.c"
    source.write_text("\n".join([HEADER, *assertions]))
    subprocess.run([compiler, "-fsyntax-only", "-x", "c", source], check=True)
