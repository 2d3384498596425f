"""CEPE: a decoder that reads chunks of context by an encoder."""

from __future__ import annotations

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import (
  CheckpointFormatError,
  CheckpointMismatchError,
  InputTypeError,
  OptionError,
  PromptError,
  ShapeError,
)
from ringjax.models import cepe
from tests import checkpoints
from tests.helpers import refused

# Biases; norms of queries and keys; norms behind and a soft cap; parallel
# parts; scaled residuals.
FAMILIES = ("llama_gqa_bias", "qwen3", "gemma2", "falcon_7b", "granite")
LONG = pytest.mark.long
ENCODER = cepe.Encoder(layers=2, width=16, heads=2, hidden=24, chunk=8)
DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(0, 90, (2, 16)).astype(np.int32)
CHUNKS = DRAW.integers(0, 90, (2, 4, 8)).astype(np.int32)


@functools.cache
def decoder(name="llama_gqa_bias"):
  return rj.models.create(checkpoints.config(name), seed=1)


@functools.cache
def model(name="llama_gqa_bias", init="copy"):
  return cepe.with_encoder(decoder(name), ENCODER, init=init, seed=2)


def close(a, b, atol=1e-5):
  np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.long
@pytest.mark.parametrize(
  "name", [FAMILIES[0], *(pytest.param(x, marks=LONG) for x in FAMILIES[1:])]
)
def test_a_zeroed_output_projection_is_the_decoder_bit_for_bit(name):
  with_zeros = model(name, "zero")
  states = cepe.encode(with_zeros, CHUNKS)
  base = decoder(name)(TOKENS)
  np.testing.assert_array_equal(with_zeros(TOKENS, states=states), base)
  np.testing.assert_array_equal(with_zeros(TOKENS), base)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES[1::2])
def test_the_order_of_chunks_and_padding_change_nothing(name):
  mine = model(name)
  read = lambda chunks: mine(TOKENS, states=cepe.encode(mine, chunks))
  got, base = read(CHUNKS), decoder(name)(TOKENS)
  # A context that counts.
  assert np.abs(np.asarray(got) - np.asarray(base)).max() > 1e-2
  close(read(CHUNKS[:, ::-1]), got)
  states = cepe.encode(mine, CHUNKS)
  nothing = jnp.full((2, 24, 16), 7.0)
  padded = type(states)(
    jnp.concatenate([states.phi, nothing], 1),
    jnp.concatenate([states.seg, jnp.zeros((2, 24), jnp.int32)], 1),
  )
  close(mine(TOKENS, states=padded), got)


@pytest.mark.long
def test_rows_have_contexts_of_their_own():
  mine = model()
  rows = [[CHUNKS[0, 0], CHUNKS[0, 1, :3]], [CHUNKS[1, 2]]]
  together = mine(TOKENS, states=cepe.encode(mine, rows))
  for row, chunks in enumerate(rows):
    states = cepe.encode(mine, [chunks])
    close(mine(TOKENS[row : row + 1], states=states)[0], together[row])


def on_mesh(shape):
  mesh = rj.make_mesh(
    shape, ("data", "seq"), devices=jax.devices()[: shape[0] * shape[1]]
  )
  return rj.models.place(model(), mesh)


@pytest.mark.long
@pytest.mark.parametrize(
  "shape", [(2, 4), *(pytest.param((1, n), marks=LONG) for n in (1, 2, 4, 8))]
)
def test_meshes_compute_the_same(shape):
  mine = model()
  want = mine(TOKENS, states=cepe.encode(mine, CHUNKS[:, :3]))
  placed = on_mesh(shape)
  states = cepe.encode(placed, CHUNKS[:, :3])
  if shape[1] > 1:
    assert states.phi.sharding.spec[1] == "seq"
  close(placed(TOKENS, states=states), want, 2e-5)


@LONG
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 4), (1, 8), (2, 4)])
def test_meshes_say_the_same(shape):
  said = []
  for mine in (model(), on_mesh(shape)):
    session = rj.infer.Session(mine, 32, batch=2)
    states = cepe.encode(mine, CHUNKS[:, :3])
    session.cache = session.cache.with_states(states)
    said.append(
      rj.infer.generate(mine, TOKENS, max_new_tokens=4, cache=session)
    )
  np.testing.assert_array_equal(said[0].tokens, said[1].tokens)


@LONG
@pytest.mark.parametrize("prefill", ["chunked", "auto"])
def test_generation_reads_the_context_of_its_session(prefill):
  mine = model()
  states = cepe.encode(mine, CHUNKS)
  session = rj.infer.Session(mine, 40, batch=2)
  session.cache = session.cache.with_states(states)
  ask = functools.partial(rj.infer.generate, mine, cache=session)
  chunk = 8 if prefill == "chunked" else None
  got = [ask(TOKENS, max_new_tokens=3, prefill=prefill, chunk=chunk).tokens]
  got.append(ask(TOKENS[:, :2], max_new_tokens=3).tokens)
  text = TOKENS
  for more, new in ((text[:, :0], got[0]), (TOKENS[:, :2], got[1])):
    text = np.concatenate([text, more], 1)
    for n in range(3):
      logits = mine(text, states=states)[:, -1]
      np.testing.assert_array_equal(np.argmax(logits, -1), new[:, n])
      text = np.concatenate([text, new[:, n : n + 1]], 1)
  # The states are the caller's still.
  close(mine(TOKENS, states=states), mine(TOKENS, states=session.cache.states))


@LONG
@pytest.mark.parametrize(
  "kind",
  [
    "int8",
    rj.kv.CacheConfig(device=16, room=8, page=8),
    rj.kv.CacheConfig(policy=rj.kv.Sinks(budget=16), room=8, page=8),
  ],
)
def test_every_kind_of_cache_carries_states(kind):
  mine = model()
  states = cepe.encode(mine, CHUNKS)
  session = rj.infer.Session(mine, 64, batch=2, cache_kind=kind)
  session.cache = session.cache.with_states(states)
  new = rj.infer.generate(mine, TOKENS, max_new_tokens=20, cache=session)
  np.testing.assert_array_equal(session.cache.states.phi, states.phi)
  # The first token is of a prompt that was read as it is.
  first = np.argmax(mine(TOKENS, states=states)[:, -1], -1)
  np.testing.assert_array_equal(first, new.tokens[:, 0])


@pytest.mark.long
def test_rows_of_a_cache_carry_their_contexts():
  mine = model()
  states = cepe.encode(mine, CHUNKS)
  cache = mine.init_cache(2, 32).with_states(states)
  swapped = cache.take(np.array([1, 0])).states
  np.testing.assert_array_equal(swapped.phi, states.phi[::-1])
  assert not cache.reset(np.array([1])).states.seg[1].any()
  one = mine.init_cache(1, 32).with_states(cepe.encode(mine, CHUNKS[1:, :1]))
  both = cache.insert(np.array([0]), one).states
  np.testing.assert_array_equal(both.seg.sum(1), [8, 32])
  none = mine.init_cache(2, 32).insert(np.array([1]), one).states
  np.testing.assert_array_equal(none.seg.sum(1), [0, 8])
  assert (
    not cache.insert(np.array([0]), mine.init_cache(1, 32)).states.seg[0].any()
  )


@pytest.mark.long
@pytest.mark.parametrize(
  "dtype", ["bfloat16", pytest.param("float32", marks=LONG)]
)
def test_bytes_of_a_token_of_context(dtype):
  mine = cepe.with_encoder(
    rj.models.create(checkpoints.config("qwen3"), dtype=dtype), ENCODER
  )
  states = cepe.encode(mine, CHUNKS)
  of_context = states.phi.nbytes / states.seg.size
  cache = mine.init_cache(2, 32)
  of_text = sum(x.nbytes for x in jax.tree.leaves(cache.slots)) / 64
  one = jnp.dtype(dtype).itemsize
  spec = mine.config.layers[0].attention
  assert of_context == ENCODER.width * one
  layers = len(mine.config.layers)
  assert of_text == 2 * layers * spec.kv_heads * spec.head_dim * one


# ---------------------------------------------------------------------------
# Folders
# ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
  "name", ["llama_gqa_bias", pytest.param("gemma2", marks=LONG)]
)
def test_a_folder_comes_back_bit_for_bit(name, tmp_path):
  mine = model(name)
  rj.models.save(mine, tmp_path / "a")
  back = rj.models.load(tmp_path / "a")
  assert isinstance(back, cepe.CepeTransformer)
  same = jax.tree.map(np.array_equal, mine, back)
  assert all(jax.tree.leaves(same))
  # The decoder alone is an ordinary folder.
  rj.models.save(back.decoder, tmp_path / "b")
  plain = rj.models.load(tmp_path / "b")
  np.testing.assert_array_equal(plain(TOKENS), decoder(name)(TOKENS))
  # And the folder of a model is written over as a whole.
  other = cepe.with_encoder(decoder(name), ENCODER, seed=9)
  rj.models.save(other, tmp_path / "a", overwrite=True)
  again = rj.models.load(tmp_path / "a")
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, other, again)))


@LONG
def test_a_folder_is_loaded_onto_a_mesh(tmp_path):
  mine = model()
  rj.models.save(mine, tmp_path / "a")
  mesh = rj.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
  back = rj.models.load(tmp_path / "a", mesh=mesh)
  states = cepe.encode(back, CHUNKS)
  want = mine(TOKENS, states=cepe.encode(mine, CHUNKS))
  close(back(TOKENS, states=states), want, 2e-5)


@pytest.mark.long
def test_broken_folders_are_refused(tmp_path):
  mine = model()
  rj.models.save(mine, tmp_path / "a")
  load = lambda: rj.models.load(tmp_path / "a")
  config = json.loads((tmp_path / "a" / "cepe.json").read_text())
  tensors = (tmp_path / "a" / "cepe.safetensors").read_bytes()
  flipped = tensors[:-1] + bytes([tensors[-1] ^ 1])
  (tmp_path / "a" / "cepe.safetensors").write_bytes(flipped)
  refused(CheckpointFormatError, load, "cepe.safetensors", "digest")
  (tmp_path / "a" / "cepe.safetensors").write_bytes(tensors)
  other = rj.models.create(checkpoints.config("llama_gqa_bias"), seed=5)
  rj.models.save(other, tmp_path / "b")
  for name in ("cepe.json", "cepe.safetensors"):
    shutil.copy(tmp_path / "a" / name, tmp_path / "b")
  refused(
    CheckpointMismatchError,
    lambda: rj.models.load(tmp_path / "b"),
    "another decoder",
    config["decoder"],
  )
  (tmp_path / "a" / "cepe.json").write_text("{}")
  refused(CheckpointFormatError, load, "cepe.json")


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("chunks", "words"),
  [
    ([], ("no row",)),
    ([[], [CHUNKS[0, 0]]], ("chunks[0]", "an empty context")),
    ([[CHUNKS[0, 0], []]], ("chunks[0][1]", "an empty context")),
    ([[np.arange(9)]], ("9 tokens", "at most 8")),
    ([[np.array([1, 900])]], ("id 900",)),
    (np.zeros((2, 3), np.int32), ("shape ()",)),
  ],
)
def test_contexts_that_cannot_be(unchecked, chunks, words):
  refused(PromptError, lambda: cepe.encode(model(), chunks), *words)


def test_models_that_cannot_be(unchecked):
  for name, word in (("deepseek_v3", "Latent"), ("qwen3_next", "Delta")):
    plain = rj.models.abstract(checkpoints.config(name))
    refused(OptionError, lambda m=plain: cepe.with_encoder(m), word)
  refused(OptionError, lambda: cepe.with_encoder(model()), "has an encoder")
  refused(InputTypeError, lambda: cepe.with_encoder({}), "dict")
  refused(OptionError, lambda: cepe.with_encoder(decoder(), init="x"), "copy")
  refused(OptionError, lambda: cepe.Encoder(width=20, heads=4), "heads")
  refused(InputTypeError, lambda: cepe.encode(decoder(), CHUNKS), "encoder")


def test_states_that_do_not_fit(unchecked):
  mine = model()
  states = cepe.encode(mine, CHUNKS)
  wide = states._replace(phi=jnp.zeros((2, 32, 24)))
  refused(ShapeError, lambda: mine(TOKENS, states=wide), "24", "16")
  refused(ShapeError, lambda: mine(TOKENS[:1], states=states), "batch of 1")
  cache = decoder().init_cache(2, 32)
  refused(InputTypeError, lambda: cache.with_states(CHUNKS), "states")
  refused(
    ShapeError, lambda: decoder().init_cache(3, 32).with_states(states), "3"
  )
  told = cache.with_states(states)
  refused(OptionError, lambda: decoder()(TOKENS, cache=told), "cross-attention")


# ---------------------------------------------------------------------------
# Contexts of a call
# ---------------------------------------------------------------------------


@pytest.mark.long
def test_generate_reads_contexts_by_the_encoder():
  mine = model()
  documents = [CHUNKS[0].reshape(-1)[:20], CHUNKS[1, 0]]
  reports = []
  ask = functools.partial(
    rj.infer.generate,
    mine,
    TOKENS,
    max_new_tokens=3,
    report=reports.append,
  )
  got = ask(contexts=documents, combine="cepe")
  first = documents[0]
  chunks = [first[:8], first[8:16], first[16:], documents[1]]
  session = rj.infer.Session(mine, 32, batch=2)
  states = cepe.encode(mine, [chunks, chunks])
  session.cache = session.cache.with_states(states)
  np.testing.assert_array_equal(ask(cache=session).tokens, got.tokens)
  first = np.argmax(mine(TOKENS, states=states)[:, -1], -1)
  np.testing.assert_array_equal(first, got.tokens[:, 0])
  made = reports[0].contexts
  assert made.tokens == made.encoded == 2 * 28 and made.contexts == 4
  refused(
    OptionError,
    lambda: rj.infer.generate(
      decoder(),
      TOKENS,
      max_new_tokens=1,
      contexts=documents,
      combine="cepe",
    ),
    "without an encoder",
  )
  for how, word in (("cepe:chunk=9", "at most 8"), ("cepe:chunk=-1", "chunk")):
    refused(OptionError, lambda h=how: ask(contexts=documents, combine=h), word)
