"""Folders whose experts are read straight into their shards."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ringjax import models
from ringjax.errors import CheckpointMismatchError
from tests import checkpoints
from tests.helpers import mesh_of, refused, two_processes

ROOT = pathlib.Path(__file__).parents[2]


def config(name="mixtral", **entries):
  """A config of eight experts in each of two layers."""
  content = checkpoints.config(name) | {"num_hidden_layers": 2}
  for key in ("num_local_experts", "num_experts", "n_routed_experts"):
    if key in content:
      content[key] = 8
  if name == "deepseek_v3":
    content["first_k_dense_replace"] = 0
  return content | entries


@pytest.mark.long_cases(1)
@pytest.mark.parametrize(
  ("name", "sizes", "over"),
  [
    ("mixtral", dict(seq=2, expert=4), "expert"),
    pytest.param(
      "deepseek_v3",
      dict(expert=2, seq=2, model=2),
      ("expert", "seq"),
      marks=pytest.mark.long,
    ),
    pytest.param(
      "qwen3_moe", dict(data=2, model=4), "model", marks=pytest.mark.long
    ),
  ],
)
def test_arrays_are_those_of_one_device(name, sizes, over, tmp_path):
  """Bits and shardings, of experts in several shards' order."""
  models.save(models.create(config(name), seed=3), tmp_path)
  mesh, rules = mesh_of(**sizes), models.Rules(experts=over)
  got = models.load(tmp_path, mesh=mesh, rules=rules)
  want = models.place(models.load(tmp_path), mesh, rules)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.sharding == b.sharding
    np.testing.assert_array_equal(a, b)


@pytest.mark.long
def test_a_number_of_an_expert_that_is_not_finite_is_named(tmp_path):
  models.save(models.create(config(), seed=3), tmp_path)
  (file,) = tmp_path.glob("*.safetensors")
  arrays = load_file(file)
  name = next(k for k in arrays if "experts.5." in k and "layers.1." in k)
  broken = np.array(arrays[name])
  broken[3, 2] = np.inf
  save_file(arrays | {name: broken}, file)
  mesh, rules = mesh_of(expert=4), models.Rules(experts="expert")
  refused(
    CheckpointMismatchError,
    lambda: models.load(tmp_path, mesh=mesh, rules=rules, dtype=jnp.float32),
    name,
    "finite",
  )


@pytest.mark.slow
@pytest.mark.skipif(
  not pathlib.Path("/proc/self/io").exists(), reason="counts bytes by /proc"
)
def test_a_process_reads_the_experts_of_its_devices_alone(tmp_path):
  """Each of two processes reads half of the experts, and the rest once."""
  models.save(models.create(config()), tmp_path / "small")
  large = config(intermediate_size=2048, hidden_size=256)
  models.save(models.create(large), tmp_path / "model")
  (file,) = (tmp_path / "model").glob("*.safetensors")
  sizes = {k: x.nbytes for k, x in load_file(file).items()}
  experts = sum(n for k, n in sizes.items() if ".experts." in k)
  others = sum(sizes.values()) - experts
  assert experts > 20 * others
  script = pathlib.Path(__file__).with_name("expert_loading_process.py")
  for result in two_processes([str(script)], tmp_path):
    assert result["equal"] and result["arrays"] > 10
    assert 0.5 * experts <= result["bytes"] < 0.6 * experts + 2 * others
