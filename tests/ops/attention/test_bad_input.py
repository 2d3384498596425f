"""What is wrong with a call is said in Python, before anything compiles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj

B, T, N, K, H = 2, 16, 4, 2, 8
INTERNAL = re.compile(
  r"in_specs|out_specs|operand \d|jaxpr|tracer|vma|shard_map body|primitive",
  re.IGNORECASE,
)


def arrays(**changes):
  x = {
    "query": jnp.ones((B, T, N, H)),
    "key": jnp.ones((B, T, K, H)),
    "value": jnp.ones((B, T, K, H)),
  }
  return x | changes


ones = jnp.ones
CASES = {
  # name: (changed arguments, error, builtin, words that must appear)
  "none": ({"query": None}, rj.InputTypeError, TypeError, "query NoneType"),
  "list": ({"key": [1.0]}, rj.InputTypeError, TypeError, "key list"),
  "string": ({"value": "x"}, rj.InputTypeError, TypeError, "value str"),
  "objects": (
    {"query": np.array([None, {}], dtype=object)},
    rj.InputTypeError,
    TypeError,
    "query ndarray",
  ),
  "int": (
    {"query": ones((B, T, N, H), jnp.int32)},
    rj.DtypeError,
    TypeError,
    "query int32 float32",
  ),
  "bool": (
    {"key": ones((B, T, K, H), bool)},
    rj.DtypeError,
    TypeError,
    "key bool",
  ),
  "complex": (
    {"value": ones((B, T, K, H), jnp.complex64)},
    rj.DtypeError,
    TypeError,
    "value complex64",
  ),
  "mixed": (
    {"key": ones((B, T, K, H), jnp.bfloat16)},
    rj.DtypeError,
    TypeError,
    "key bfloat16 float32 astype",
  ),
  "float64": (
    {"query": np.ones((B, T, N, H))},
    rj.DtypeError,
    TypeError,
    "query float64 jax_enable_x64",
  ),
  "rank 2": (
    {"query": ones((T, H))},
    rj.ShapeError,
    ValueError,
    "query (16, 8)",
  ),
  "rank 5": (
    {"key": ones((1, B, T, K, H))},
    rj.ShapeError,
    ValueError,
    "key (1, 2, 16, 2, 8)",
  ),
  "mixed rank": (
    {"key": ones((T, K, H))},
    rj.ShapeError,
    ValueError,
    "key (16, 2, 8) (2, 16, 4, 8)",
  ),
  "batch": (
    {"key": ones((3, T, K, H)), "value": ones((3, T, K, H))},
    rj.ShapeError,
    ValueError,
    "key 3 (2, 16, 4, 8)",
  ),
  "head dim": (
    {"key": ones((B, T, K, 4))},
    rj.ShapeError,
    ValueError,
    "key 4 8",
  ),
  "lengths": (
    {"value": ones((B, 8, K, H))},
    rj.ShapeError,
    ValueError,
    "value (2, 8, 2, 8) (2, 16, 2, 8)",
  ),
  "kv heads": (
    {"value": ones((B, T, 1, H))},
    rj.ShapeError,
    ValueError,
    "value",
  ),
  "groups": (
    {"key": ones((B, T, 3, H)), "value": ones((B, T, 3, H))},
    rj.ShapeError,
    ValueError,
    "4 3 multiple",
  ),
  "empty": (
    {"query": ones((B, 0, N, H))},
    rj.ShapeError,
    ValueError,
    "query sequence length 0",
  ),
  "no heads": (
    {"query": ones((B, T, 0, H))},
    rj.ShapeError,
    ValueError,
    "head",
  ),
  "bias": (
    {"bias": ones((B, N, T, 3))},
    rj.ShapeError,
    ValueError,
    "bias (2, 4, 16, 3)",
  ),
  "int bias": (
    {"bias": ones((T, T), jnp.int32)},
    rj.DtypeError,
    TypeError,
    "bias int32",
  ),
  "bias rank": (
    {"bias": ones((1, 1, 1, T, T))},
    rj.ShapeError,
    ValueError,
    "bias",
  ),
  "float mask": (
    {"mask": ones((T, T))},
    rj.DtypeError,
    TypeError,
    "mask float32 bias",
  ),
  "mask shape": (
    {"mask": ones((5, T), bool)},
    rj.ShapeError,
    ValueError,
    "mask",
  ),
  "mask combined": (
    {"mask": "causal"},
    rj.InputTypeError,
    TypeError,
    "mask str",
  ),
  "mask class": (
    {"mask": rj.Causal},
    rj.InputTypeError,
    TypeError,
    "mask class Causal(...)",
  ),
  "prefix": (
    {"mask": rj.Causal() | rj.Prefix(2.5)},
    rj.OptionError,
    ValueError,
    "mask Prefix float int",
  ),
  "prefix shape": (
    {"mask": rj.Prefix(jnp.array([1, 2, 3]))},
    rj.OptionError,
    ValueError,
    "mask Prefix (3,) (2,)",
  ),
  "scale": ({"scale": float("nan")}, rj.OptionError, ValueError, "scale nan"),
  "scale of float64": (
    {"scale": 1e300},
    rj.OptionError,
    ValueError,
    "scale 1e+300 float32",
  ),
  "another axis in the strategy": (
    {"strategy": rj.Ring(axis="foo")},
    rj.OptionError,
    ValueError,
    "strategy 'foo' no axis",
  ),
  "scale word": ({"scale": "big"}, rj.OptionError, ValueError, "scale 'big'"),
  "soft cap": (
    {"logits_soft_cap": 0.0},
    rj.OptionError,
    ValueError,
    "logits_soft_cap 0.0",
  ),
  "causal": ({"is_causal": "yes"}, rj.InputTypeError, TypeError, "is_causal"),
  "window": (
    {"local_window_size": -1},
    rj.OptionError,
    ValueError,
    "local_window_size -1",
  ),
  "window pair": (
    {"local_window_size": (1, 2, 3)},
    rj.OptionError,
    ValueError,
    "local_window_size",
  ),
  "q lengths": (
    {"query_seq_lengths": ones((3,), jnp.int32)},
    rj.ShapeError,
    ValueError,
    "query_seq_lengths (3,) (2,)",
  ),
  "q lengths dtype": (
    {"query_seq_lengths": ones((B,))},
    rj.DtypeError,
    TypeError,
    "query_seq_lengths float32",
  ),
  "segments": (
    {"q_segment_ids": ones((B, 5), jnp.int32)},
    rj.ShapeError,
    ValueError,
    "q_segment_ids (2, 5)",
  ),
  "segment dtype": (
    {"q_segment_ids": ones((B, T))},
    rj.DtypeError,
    TypeError,
    "q_segment_ids float32",
  ),
  "negative segment": (
    {"q_segment_ids": -ones((B, T), jnp.int32)},
    rj.OptionError,
    ValueError,
    "q_segment_ids -1",
  ),
  "wide segments": (
    {"q_segment_ids": np.full((B, T), 2**32 + 1)},
    rj.OptionError,
    ValueError,
    "q_segment_ids 4294967297 int64 int32",
  ),
  "wide positions": (
    {"kv_positions": np.arange(T, dtype=np.uint32) + np.uint32(2**31 - 3)},
    rj.OptionError,
    ValueError,
    "kv_positions 2147483660 uint32 int32",
  ),
  "positions": (
    {"kv_positions": ones((3, T), jnp.int32)},
    rj.ShapeError,
    ValueError,
    "kv_positions (3, 16)",
  ),
  "sinks": (
    {"sinks": ones((K,))},
    rj.ShapeError,
    ValueError,
    "sinks (2,) (4,)",
  ),
  "int sinks": (
    {"sinks": ones((N,), jnp.int32)},
    rj.DtypeError,
    TypeError,
    "sinks int32",
  ),
  "slopes": (
    {"alibi_slopes": ones((N, 1))},
    rj.ShapeError,
    ValueError,
    "alibi_slopes (4, 1)",
  ),
  "rate": (
    {"dropout_rate": 1.0, "dropout_seed": 0},
    rj.OptionError,
    ValueError,
    "dropout_rate 1.0",
  ),
  "no seed": (
    {"dropout_rate": 0.1},
    rj.OptionError,
    ValueError,
    "dropout_seed",
  ),
  "seed dtype": (
    {"dropout_rate": 0.1, "dropout_seed": ones(())},
    rj.DtypeError,
    TypeError,
    "dropout_seed float32",
  ),
  "strategy": (
    {"strategy": "rings"},
    rj.OptionError,
    ValueError,
    "strategy 'rings' ring gather ulysses",
  ),
  "strategy object": (
    {"strategy": rj.Blockwise()},
    rj.OptionError,
    ValueError,
    "strategy Blockwise",
  ),
  "layout": (
    {"layout": "striped"},
    rj.InputTypeError,
    TypeError,
    "layout 'striped' Striped",
  ),
  "axis": ({"axis": "sequence"}, rj.MeshError, ValueError, "axis mesh"),
  "axis tuple": ({"axis": ("a", "b")}, rj.MeshError, ValueError, "axis"),
  "mesh": ({"mesh": 8}, rj.MeshError, ValueError, "mesh int"),
  "implementation": (
    {"implementation": "flash"},
    rj.OptionError,
    ValueError,
    "implementation 'flash'",
  ),
}


def raises(error, builtin, words, call):
  with jax.log_compiles(False), pytest.raises(error) as caught:
    call()
  text = str(caught.value)
  assert isinstance(caught.value, builtin)
  assert isinstance(caught.value, rj.RingjaxError)
  assert len(text) <= 400, text
  assert not INTERNAL.search(text), text
  for word in words.split(" "):
    assert word.strip("(),") in text, (word, text)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("jit", [False, True])
def test_bad_argument(name, jit):
  changes, error, builtin, words = CASES[name]
  call = lambda: rj.dot_product_attention(**arrays(**changes))
  if jit:
    # Raised while tracing: nothing has been compiled or sent.
    call = lambda: jax.jit(
      lambda: rj.dot_product_attention(**arrays(**changes))
    ).lower()
  raises(error, builtin, words, call)


def mesh_of(shape, names, kind=AxisType.Auto):
  size = int(np.prod(shape))
  return jax.make_mesh(
    shape,
    names,
    axis_types=(kind,) * len(names),
    devices=jax.devices()[:size],
  )


def test_mesh_errors():
  mesh = mesh_of((2, 4), ("data", "ring"))
  x = tuple(arrays().values())
  bad = rj.MeshError, ValueError
  raises(
    *bad,
    "axis 'seq' data ring",
    lambda: rj.ring_attention(*x, mesh=mesh, axis="seq"),
  )
  unclear = mesh_of((2, 4), ("rows", "ring"))
  raises(*bad, "axis rows ring", lambda: rj.ring_attention(*x, mesh=unclear))
  raises(*bad, "axis mesh set_mesh", lambda: rj.ring_attention(*x))
  raises(*bad, "shape 16 devices", lambda: rj.make_mesh((16,), ("seq",)))
  raises(*bad, "axis_names", lambda: rj.make_mesh((2, 4), ("seq",)))
  raises(*bad, "shape", lambda: rj.make_mesh((-1, 3), ("data", "seq")))
  explicit = mesh_of((2, 4), ("seq", "model"), AxisType.Explicit)
  put = lambda a: jax.device_put(
    a, NamedSharding(explicit, P(None, "seq", "model"))
  )
  q, k = put(ones((1, 8, 8, 4))), jnp.ones((1, 8, 2, 4))
  raises(*bad, "key 2 heads 4 model", lambda: rj.dot_product_attention(q, k, k))
  wrong = jax.device_put(ones((2, 8, 8, 4)), NamedSharding(explicit, P("seq")))
  raises(
    *bad,
    "q batch 'seq'",
    lambda: rj.dot_product_attention(wrong, wrong, wrong, axis="seq"),
  )


@pytest.mark.parametrize(
  ("said", "words"),
  [
    ({"batch_axis": "rows"}, "batch_axis 'rows' data seq"),
    ({"head_axis": 3}, "head_axis 3 tuple"),
    ({"batch_axis": ("data", "data")}, "batch_axis tuple"),
    ({"batch_axis": "seq"}, "batch_axis 'seq' sequence"),
    ({"batch_axis": "data", "head_axis": ("data",)}, "head_axis 'data'"),
    ({"batch_axis": ("data", "model")}, "2 examples 4 shards multiple"),
    ({"head_axis": ("data", "model", "more")}, "4 heads 8 shards multiple"),
  ],
  ids=str,
)
def test_where_batch_and_heads_lie(said, words):
  mesh = mesh_of((2, 2, 1, 2), ("data", "model", "seq", "more"))
  q = ones((2, 16, 4, 8))
  call = lambda **rest: rj.dot_product_attention(q, q, q, **said, **rest)
  raises(rj.MeshError, ValueError, words, lambda: call(mesh=mesh))
  first = next(iter(said))
  if said[first] != 3 and said[first] != ("data", "data"):
    raises(rj.MeshError, ValueError, f"{first} outside mesh", call)
    inside = lambda: jax.shard_map(
      lambda q: rj.dot_product_attention(q, q, q, axis="seq", **said),
      mesh=mesh,
      in_specs=P(None, "seq"),
      out_specs=P(None, "seq"),
    )(q)
    raises(rj.MeshError, ValueError, f"{first} shard_map", inside)


def test_alignment_of_causal_keys():
  x = arrays(key=ones((B, 24, K, H)), value=ones((B, 24, K, H)))
  for call in (
    lambda: rj.blockwise_attention(**x, is_causal=True),
    lambda: rj.ring_attention(
      **x, mesh=mesh_of((4,), ("seq",)), is_causal=True
    ),
  ):
    raises(rj.ShapeError, ValueError, "is_causal 16 24 q_positions", call)
  segments = jnp.ones((B, T), jnp.int32)
  raises(
    rj.ShapeError,
    ValueError,
    "kv_segment_ids 16 24",
    lambda: rj.dot_product_attention(**x, q_segment_ids=segments),
  )


def test_a_flag_that_is_traced():
  x = arrays()
  f = lambda yes: rj.dot_product_attention(**x, is_causal=yes)
  raises(
    rj.InputTypeError,
    TypeError,
    "is_causal traced bool",
    lambda: jax.jit(f).lower(True),
  )
  raises(
    rj.InputTypeError,
    TypeError,
    "return_residual 'yes'",
    lambda: rj.dot_product_attention(**x, return_residual="yes"),
  )


@pytest.mark.parametrize(
  ("changes", "error", "words"),
  [
    ({"q_at": rj.Coords(jnp.arange(5), jnp.ones(5, int))}, "Shape", "q_at.pos"),
    ({"k_at": jnp.arange(T)}, "InputType", "k_at Coords(pos, seg)"),
    ({"k_at": rj.Coords(jnp.arange(T), None)}, "InputType", "k_at"),
    ({"mask": ones((T, T), bool)}, "InputType", "mask Causal()"),
    ({"strategy": "ring"}, "Option", "strategy 'ring' axis"),
    ({"strategy": rj.Ring}, "Option", "strategy axis"),
    ({"strategy": rj.Gather(rj.Dense)}, "Option", "strategy Dense()"),
  ],
  ids=str,
)
def test_attention_between_coordinates(changes, error, words):
  at = rj.Coords(jnp.arange(T), jnp.ones(T, jnp.int32))
  given = {"q_at": at, "k_at": at, "mask": rj.Causal()} | changes
  given = {"strategy": rj.Gather()} | given
  error = getattr(rj, f"{error}Error")
  builtin = error.__mro__[2]
  raises(
    error, builtin, words, lambda: rj.attention(*arrays().values(), **given)
  )


def test_named_functions_know_their_options():
  x = arrays()
  mesh = mesh_of((4,), ("seq",))
  for name in ("strategy", "implementation", "dropout", "window"):
    raises(
      rj.OptionError,
      ValueError,
      f"{name} unknown",
      functools.partial(rj.ring_attention, **x, mesh=mesh, **{name: 1}),
    )
  raises(
    rj.OptionError,
    ValueError,
    "layout Striped",
    lambda: rj.striped_attention(**x, mesh=mesh, layout=rj.Zigzag()),
  )
  for block in (0, -1, 2.0):
    raises(
      rj.OptionError,
      ValueError,
      "q_block",
      functools.partial(rj.blockwise_attention, **x, q_block=block),
    )


def test_layouts_and_masks():
  raises(rj.OptionError, ValueError, "block 0", lambda: rj.Striped(0))
  raises(rj.OptionError, ValueError, "block True", lambda: rj.Striped(True))
  assert rj.Striped(np.int64(2)) == rj.Striped(2)
  raises(
    rj.OptionError,
    ValueError,
    "shards 0",
    lambda: rj.Striped().permute(ones((2, 8)), shards=0),
  )
  raises(
    rj.ShapeError,
    ValueError,
    "axis 2 (2, 8)",
    lambda: rj.Zigzag().permute(ones((2, 8)), shards=2, axis=2),
  )
  raises(
    rj.InputTypeError,
    TypeError,
    "x int",
    lambda: rj.Zigzag().permute([[1, 2]], shards=2),
  )
  raises(rj.OptionError, ValueError, "Window 0", lambda: rj.Window(0))
  raises(rj.OptionError, ValueError, "ahead -1", lambda: rj.Window(1, -1))
  raises(rj.OptionError, ValueError, "ahead True", lambda: rj.Window(1, True))
  assert rj.Window(3, np.int64(0)).reach == (2, 0)
  raises(rj.OptionError, ValueError, "Chunked", lambda: rj.Chunked(2.5))
  raises(rj.OptionError, ValueError, "& str", lambda: rj.Causal() & "window")


def test_shards_that_do_not_fit_their_layout():
  mesh = mesh_of((2,), ("seq",))

  def run(layout, tokens):
    f = lambda q: rj.ring_attention(q, q, q, axis="seq", layout=layout)
    spec = P(None, "seq")
    jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(
      ones((1, tokens, 1, 4))
    )

  raises(rj.ShapeError, ValueError, "query 3 even", lambda: run(rj.Zigzag(), 6))
  raises(rj.ShapeError, ValueError, "query 6 4", lambda: run(rj.Striped(4), 12))


def test_a_shard_map_inside_of_another_is_on_the_same_mesh():
  mesh, q = mesh_of((2, 2), ("data", "seq")), ones((2, 16, 4, 8))

  def run(inner):
    f = lambda q: rj.dot_product_attention(q, q, q, mesh=inner, axis="seq")
    spec = P("data")
    return jax.shard_map(
      f, mesh=mesh, axis_names={"data"}, in_specs=spec, out_specs=spec
    )(q)

  np.testing.assert_allclose(run(mesh), run(None))
  raises(
    rj.MeshError,
    ValueError,
    "mesh ('seq', 4) shard_map ('data', 2)",
    lambda: run(mesh_of((4,), ("seq",))),
  )


@pytest.mark.parametrize("shards", [1, 2])
def test_forward_mode_says_what_to_use(shards):
  q, mesh = ones((1, 8, 1, 4)), mesh_of((shards,), ("seq",))
  f = lambda x: rj.dot_product_attention(x, x, x, mesh=mesh)
  raises(
    rj.OptionError,
    ValueError,
    "strategy forward Ring(Dense())",
    lambda: jax.jvp(f, (q,), (q,)),
  )


def test_higher_order_says_what_to_use():
  q = ones((1, 8, 1, 4))
  f = lambda x: jnp.sum(rj.dot_product_attention(x, x, x) ** 2)
  g = lambda x: jnp.sum(jax.grad(f)(x) ** 2)
  raises(rj.OptionError, ValueError, "Dense() forward", lambda: jax.grad(g)(q))


def test_zero_batch_is_fine():
  x = {name: a[:0] for name, a in arrays().items()}
  out, lse = rj.dot_product_attention(**x, return_residual=True)
  assert out.shape == (0, T, N, H) and lse.shape == (0, T, N)
