"""LongCat-Flash: shortcuts of experts, identities, shards and refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import ringjax as rj
from ringjax.errors import CheckpointMismatchError, ConfigError, OptionError
from ringjax.eval.entropy import attention_statistics
from ringjax.kv.layer_spec import LayerCacheSpec, by_model_layer
from ringjax.nn.feedforward import Experts, Grouped
from ringjax.nn.sharding_context import ContextParallel
from ringjax.parallel.layout import Striped, Zigzag
from ringjax.serve import Engine, Request
from tests import checkpoints
from tests.helpers import make_mesh, mesh_of, refused

NAME = "longcat_flash"
EXPECTED = checkpoints.expected(NAME)


def close(got, want, atol=5e-5):
  np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return checkpoints.write(NAME, tmp_path_factory.mktemp(NAME) / "model")


def experts(**options):
  return Experts(
    experts=4,
    chosen=3,
    hidden=6,
    act="silu",
    router=Grouped(renormalise=False, softmax=True, judged=1),
    **options,
  )


@functools.cache
def identity_case():
  layer = experts(identities=2).build(nnx.Rngs(0), 5)
  return layer, jax.random.normal(jax.random.key(1), (2, 7, 5))


def by_hand(layer, x):
  """Each token's experts, one after another, in float64."""
  x = np.asarray(x, np.float64)
  get = lambda p: np.asarray(p.get_value(), np.float64)
  logits = x @ get(layer.router.weight)
  weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  y, gates, ups, downs = (
    np.zeros_like(x), get(layer.gate), get(layer.up), get(layer.down),
  )  # fmt: skip
  for place in np.ndindex(x.shape[:-1]):
    for expert in np.argsort(-weights[place])[: layer.spec.chosen]:
      out = x[place]
      if expert < layer.spec.experts:
        gate = out @ gates[expert]
        gate = gate / (1 + np.exp(-gate))
        out = (gate * (out @ ups[expert])) @ downs[expert]
      y[place] += weights[place][expert] * out
  return y, weights


def test_identities_are_experts_whose_output_is_their_input():
  layer, x = identity_case()
  want, weights = by_hand(layer, x)
  best = np.argsort(-weights)[..., : layer.spec.chosen]
  # Some tokens have one, some have several and some have none.
  assert set((best >= layer.spec.experts).sum(-1).flat) >= {0, 1, 2}
  close(layer(x, ContextParallel()), want, 1e-6)


@pytest.mark.slow
def test_experts_on_shards_have_the_same_logits_and_gradients():
  """Identities travel to no shard, and their router has a gradient, too."""
  config = checkpoints.config(NAME) | {"num_layers": 1, "n_routed_experts": 4}
  model = rj.models.create(config, seed=1)
  sharded = rj.models.place(
    model, mesh_of(expert=4), rj.models.Rules(experts="expert")
  )
  tokens = EXPECTED.tokens[:, :12]

  def squares(model):
    logits = model(tokens)
    return jnp.mean(jnp.square(logits)), logits

  run = jax.jit(jax.grad(squares, has_aux=True))
  (want, logits), (got, logits_of_shards) = run(model), run(sharded)
  close(logits_of_shards, logits, 1e-5)
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True
  ):
    x, y = np.asarray(x), np.asarray(y)
    close(y, x, 1e-5 * (1 + np.abs(x).max()))
    assert x.any() == ("correction" not in jax.tree_util.keystr(path)), path


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Striped(), Zigzag()])
def test_layouts(folder, layout):
  mesh = make_mesh(4, "auto")
  model = rj.models.load(folder, mesh=mesh, dtype=jnp.float32)
  order = layout.padded_order(40, 4)
  attend = ContextParallel(mesh=mesh, axis="seq", layout=layout)
  logits = model(EXPECTED.tokens[:, order], attend=attend)
  close(np.asarray(logits)[:, np.argsort(order)], EXPECTED.logits)


@pytest.mark.slow
def test_rows_of_other_lengths_and_a_second_turn(folder):
  model = rj.models.load(folder, dtype=jnp.float32)
  prompts = [EXPECTED.prompt[0], EXPECTED.prompt[1][:5]]
  new = rj.infer.generate(model, prompts, max_new_tokens=8)
  np.testing.assert_array_equal(new[0], EXPECTED.greedy[0, :8])
  (alone,) = rj.infer.generate(model, prompts[1:], max_new_tokens=8)
  np.testing.assert_array_equal(new[1], alone)
  session = rj.infer.Session(model, 64, batch=2)
  rj.infer.read_context(model, EXPECTED.prompt[:, :11], cache=session)
  new = rj.infer.generate(
    model, EXPECTED.prompt[:, 11:], max_new_tokens=12, cache=session
  )
  np.testing.assert_array_equal(new, EXPECTED.greedy[:, :12])


@pytest.mark.slow
def test_an_engine_serves_it(folder):
  model = rj.models.load(folder, dtype=jnp.float32)
  engine = Engine(model, rows=2, capacity=256, longest=64, page=16)
  answers = [
    engine.submit(Request(prompt=prompt, max_new_tokens=8))
    for prompt in EXPECTED.prompt
  ]
  for answer, want in zip(answers, EXPECTED.greedy, strict=True):
    np.testing.assert_array_equal(list(answer), want[:8])


@pytest.mark.long
def test_maps_of_identities_are_not_read(folder, tmp_path):
  """transformers saves first maps for them, which published files lack."""
  config, arrays = checkpoints.config(NAME), checkpoints.tensors(NAME)
  first = "model.layers.0.mlp.experts.{}.gate_proj.weight"
  further = {first.format(5): arrays[first.format(0)]}
  path = checkpoints.write_folder(arrays | further, config, tmp_path / "model")
  rj.models.save(rj.models.load(path), tmp_path / "saved")
  saved = load_file(tmp_path / "saved" / "model.safetensors")
  # As other tensors that the model does not use, they are saved with it.
  assert saved.keys() == {*arrays, *further}
  unknown = {first.format(8): arrays[first.format(0)]}
  path = checkpoints.write_folder(arrays | unknown, config, tmp_path / "other")
  with pytest.raises(CheckpointMismatchError, match=r"experts\.8\."):
    rj.models.load(path)


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("num_hidden_layers", 3),
    ("zero_expert_type", "copy"),
    ("mla_scale_q_lora", False),
    ("router_bias", True),
    ("norm_topk_prob", True),
    ("q_lora_rank", None),
    ("moe_topk", 9),
    ("head_dim", 12),
    ("num_key_value_heads", 2),
  ],
)
def test_what_does_not_fit_is_refused(key, value):
  with pytest.raises(ConfigError, match=key):
    rj.models.read_config(checkpoints.config(NAME) | {key: value})


def test_results_by_layer_are_refused_where_a_layer_has_two_attentions(folder):
  model, tokens = rj.models.load(folder), EXPECTED.tokens[:, :16]
  for result, ask in (
    ("attention statistics", lambda: attention_statistics(model, tokens)),
    (
      "codecs by layer",
      lambda: rj.kv.allocate_bits(model, tokens, bits=6),
    ),
  ):
    refused(OptionError, ask, "layer 0 keeps 2 sets of keys", result)


def test_kept_positions_of_both_attentions_are_joined():
  shapes = [LayerCacheSpec(2, 1, 4, 4, which=(0, 2)) for _ in range(2)]
  both = by_model_layer(shapes, [[["a"], ["b"]], [["c"], ["d"]]])
  assert both == [["a", "c"], None, ["b", "d"]]
