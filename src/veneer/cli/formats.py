"""The table of formats in the help of `veneer quantize`: bits per value and errors."""

from typing import Any, NamedTuple


class FormatCost(NamedTuple):
    """A row of the table of formats: bits per value, and the relative error of two models' weights.

    The numbers are from docs/formats.md.
    """

    name: str
    tile: str
    bits: str
    gaussian: str
    minilm: str


FORMAT_COSTS = (
    FormatCost("int8", "channel", "8.03", "0.78%", "0.99%"),
    FormatCost("int6", "64", "6.25", "2.44%", "2.62%"),
    FormatCost("int4", "128", "4.12", "11.08%", "12.05%"),
    FormatCost("int4", "64", "4.25", "10.28%", "10.96%"),
    FormatCost("int4", "32", "4.50", "9.47%", "9.94%"),
    FormatCost("uint4", "64", "4.38", "9.10%", "9.51%"),
    FormatCost("uint4", "32", "4.75", "8.08%", "8.31%"),
    FormatCost("nf4", "64", "4.25", "9.19%", "9.39%"),
    FormatCost("nf4_dq", "64", "4.13", "9.24%", "9.43%"),
    FormatCost("fp8", "channel", "8.03", "2.64%", "2.61%"),
    FormatCost("mxfp8", "32", "8.25", "2.65%", "2.65%"),
    FormatCost("mxfp6", "32", "6.25", "2.83%", "2.86%"),
    FormatCost("mxfp4", "32", "4.25", "11.54%", "11.95%"),
    FormatCost("nvfp4", "16", "4.50", "9.50%", "9.44%"),
    FormatCost("int3", "32", "3.50", "20.29%", "21.26%"),
    FormatCost("int2", "32", "2.50", "47.17%", "48.65%"),
    FormatCost("ternary", "32", "2.10", "50.41%", "52.39%"),
)
#: The formats that the table leaves out.
MORE_FORMATS = (
    *("int7", "int5", "int1", "uint8", "uint7", "uint6", "uint5", "uint3", "uint2"),
    *("fp8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3b11fnuz", "fp6_e2m3", "fp6_e3m2", "fp4", "fp4_bnb", "iq4_nl", "dynamic8"),
    *("mxfp8_16", "mxfp8_e5m2", "mxfp6_e3m2"),
)


def write_formats(formatter: Any) -> None:
    """Write the table, as a section of the help, to a click formatter."""
    with formatter.section("Formats"):
        indent = " " * formatter.current_indent
        headings = FormatCost("--format", "--tile", "bits", "Gaussian", "MiniLM")
        for row in (headings, *FORMAT_COSTS):
            cells = f"{row.name:<10}{row.tile:>8}{row.bits:>7}{row.gaussian:>10}{row.minilm:>9}"
            formatter.write(f"{indent}{cells}\n")
        formatter.write("\n")
        formatter.write_text(
            "bits: bits per value, including bfloat16 scales. Gaussian, MiniLM: the relative error "
            "of Gaussian weights and of the linear layers of all-MiniLM-L6-v2, measured with this "
            "--tile. channel: one scale per output channel. Without --tile, the tile is channel "
            "for 8 bits, 64 for 4 to 7 bits, and 32 for fewer. The mx formats and nvfp4 have no "
            "other tile."
        )
        formatter.write("\n")
        formatter.write_text(f"Further formats: {', '.join(MORE_FORMATS)}.")
