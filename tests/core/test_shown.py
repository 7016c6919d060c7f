"""The repr of implicit arrays, and how notebooks and treescope show them."""

import html.parser

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import treescope
from flax import nnx
from support import arrays
from support.array_types import MAKERS
from support.every_type import EVERY_TYPE, Arrays

import veneer as vn
from veneer._core.surface.array import title

# treescope emits it with a newer NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")

W = arrays.array(np.arange(1.0, 64 * 128 + 1).reshape(64, 128))
Q4 = arrays.quantized("int4", 64, 128, tile=32)
LORA = vn.types.LoraArray(Q4, arrays.normal(64, 8), arrays.zeros((8, 128)))
KEY = arrays.key(1)

TITLES = arrays.OnDemand(
    {
        "q4[64,128] tile 32, 5 bits": lambda: Q4,
        "nf4[64,128] channelwise, bfloat16, 4.25 bits": lambda: vn.quant.quantize(
            W.astype("bfloat16"), "nf4", channelwise_axes=(1,)
        ),
        "nvfp4[64,128] tile 16, 4.5 bits": lambda: vn.quant.quantize(W, "nvfp4"),
        "lora[64,128] rank 8 over q4[64,128] tile 32, 11 bits": lambda: LORA,
        "fakequantized[64,128] as nf4, tile 32, 32 bits": lambda: vn.quant.FakeQuantized(
            W, qtype="nf4", tile_size=32
        ),
        "frozen[64,128] over q4[64,128] tile 32, 5 bits": lambda: vn.freeze(Q4),
        "diagonal[4,4], 8 bits": lambda: vn.types.Diagonal(arrays.ones(4)),
    }
)


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())


@pytest.mark.parametrize("shown", TITLES)
def test_titles_show_the_shape_and_the_storage(shown):
    value = TITLES[shown]
    assert title(value) == shown
    assert title(jax.eval_shape(lambda: value)) == shown
    assert shown in Page(value._repr_html_()).text
    assert shown in treescope.render_to_text(value)


@pytest.mark.parametrize("make", MAKERS)
def test_every_type_is_shown_by_its_title(make):
    value = MAKERS[make](KEY)
    page = Page(value._repr_html_())
    assert not page.open
    assert title(value) in page.text
    assert type(value).__name__ != title(value)
    assert title(value) in treescope.render_to_text(value)
    assert title(value) in treescope.render_to_text([value])


SHOWN = {
    **EVERY_TYPE,
    "ActivationQuantized": lambda a: vn.quant.ActivationQuantized(a(4, 4), qtype="int8"),
    "FakeQuantized": lambda a: vn.quant.FakeQuantized(a(4, 4), qtype="int8"),
    "StraightThrough": lambda a: vn.ste(lambda w: vn.quant.quantize(w, "int8"))(a(4, 4)),
}


def on_host(x):
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key else np.asarray(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHOWN)
def test_numpy_leaves_are_shown_like_jax_arrays(name, dtype):
    value = SHOWN[name](Arrays((), dtype))
    same = jax.tree.map(on_host, value)
    assert repr(same) == repr(value)
    assert title(same) == title(value)
    assert same._repr_html_() == value._repr_html_()
    summaries = [vn.summary({"w": x}) for x in (same, value)]
    assert str(summaries[0]) == str(summaries[1])
    assert summaries[0]._repr_html_() == summaries[1]._repr_html_()


SCALARS = [2, 2.5, True, 1j, np.float32(2), np.float64(2), np.bool_(1), np.ones(())]
SCALARS += [ml_dtypes.bfloat16(1), np.asarray(3, ml_dtypes.int4)]


@pytest.mark.parametrize("fill", SCALARS, ids=lambda x: f"{type(x).__name__}-{x!r}")
def test_scalar_leaves_are_shown(fill):
    value = vn.types.Constant(fill, (4, 4))
    assert repr(value).startswith("Constant(fill=")
    assert "constant[4,4]" in Page(value._repr_html_()).text[0]
    assert vn.summary({"w": value}).rows[0].shape == (4, 4)


def test_treescope_unfolds_to_codes_and_scales():
    text = treescope.render_to_text(LORA)
    for part in ("uint8(64, 64)", "float32(2, 128)", "a=", "b=", "qtype='int4'"):
        assert part in text
    assert "HTML" not in text


def test_an_nnx_module_shows_its_weights():
    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(Q4)
            self.adapted = nnx.Param(LORA)

    text = treescope.render_to_text(Model())
    assert "value=q4[64,128] tile 32, 5 bits" in text
    assert "value=lora[64,128] rank 8 over q4[64,128]" in text
    assert "value=QArray(q4[64,128] tile 32, 5 bits)" in repr(Model())


def test_reprs_are_short_in_a_tree():
    assert repr(Q4) == "QArray(q4[64,128] tile 32, 5 bits)"
    assert repr({"kernel": Q4}) == "{'kernel': QArray(q4[64,128] tile 32, 5 bits)}"
    assert "q4[64,128] tile 32" in repr(jax.eval_shape(lambda: Q4))


@pytest.mark.parametrize("leaf", [None, True, "a string", jax.sharding.PartitionSpec("x")])
def test_leaves_that_are_not_arrays_are_shown_as_fields(leaf):
    part = jax.tree.map(lambda _: leaf, LORA)
    assert title(part) == "LoraArray"
    assert repr(part.w).startswith(f"QArray(packed={leaf!r}, scale={leaf!r}")
    assert not Page(part._repr_html_()).open
    assert "LoraArray" in treescope.render_to_text(part)


def test_html_is_escaped():
    class Tagged(vn.ImplicitArray):
        x: jax.Array
        tag: str = vn.static()

        def materialise(self):
            return self.x

    assert "<b>" not in Tagged(jnp.ones(2), "<b>")._repr_html_()


def test_a_field_can_be_named_title_or_rank():
    class Stored(vn.ImplicitArray):
        rank: jax.Array
        title: jax.Array

        def materialise(self):
            return self.rank * self.title

    assert Stored(jnp.ones(2), jnp.ones(2))._repr_html_()


def test_a_class_can_describe_its_storage():
    class Halved(vn.ImplicitArray):
        half: jax.Array
        type_name = "h"
        storage_name = property(lambda self: f"of {self.half.shape[-1]}")

        def materialise(self):
            return jnp.concatenate([self.half, self.half], -1)

    assert title(Halved(jnp.ones(4))) == "h[8] of 4, 16 bits"
    assert vn.summary(Halved(jnp.ones(4))).rows[0].format == "Halved of 4"
