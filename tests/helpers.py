"""What several test files need."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

# A model that compiles fast, for tests of what is around it.
SMALL = {
  "architectures": ["MistralForCausalLM"],
  "model_type": "mistral",
  "vocab_size": 64,
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "sliding_window": None,
}

# Characters of an error, at most.
MESSAGE_LIMIT = 400

_KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def make_mesh(n: int, kind: Literal["auto", "explicit"]) -> Mesh:
  """The first `n` devices in a row, as the axis "seq".

  Built by JAX alone, so that a test of ringjax's own meshes has something to
  be compared with.
  """
  return jax.make_mesh(
    (n,), ("seq",), axis_types=(_KINDS[kind],), devices=jax.devices()[:n]
  )


def two_processes(command: Sequence[str], *arguments: object) -> list[dict]:
  """Results of two processes of one job, each the JSON after "RESULT".

  Args:
    command: Arguments of Python: a script, or "-c" and a program.
    arguments: Arguments after the port of the job and the process's number.
  """
  root = pathlib.Path(__file__).parents[1]
  with contextlib.closing(socket.socket()) as sock:
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
  words = [*map(str, arguments)]
  runs = [
    subprocess.Popen(
      [sys.executable, *command, str(port), str(n), *words],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=root,
      env=os.environ | {"PYTHONPATH": str(root)},
    )
    for n in range(2)
  ]
  results = []
  try:
    for run in runs:
      out, err = run.communicate()
      assert run.returncode == 0, err
      results.append(json.loads(out.partition("RESULT")[2]))
  finally:
    for run in runs:
      run.kill()
  return results


def mesh_of(**sizes: int) -> Mesh:
  """A mesh of automatic axes, by their names and sizes."""
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
    devices=jax.devices()[: math.prod(sizes.values())],
  )


def swept(every, often):
  """Cases of a sweep: `often` in the longer run, the others in the slow one.

  Args:
    every: tuples.
    often: some of these; others are added.
  """
  marks = dict.fromkeys(every, pytest.mark.slow)
  marks |= dict.fromkeys(often, pytest.mark.long)
  return [pytest.param(*case, marks=mark) for case, mark in marks.items()]


def as_tpu(monkeypatch):
  """Stores caches, and writes them, on CPUs from now on as on a TPU."""
  platform = property(lambda _: "tpu")
  monkeypatch.setattr("ringjax.kv.base.CacheSpec.platform", platform)
  real = jax.lax.platform_dependent

  def dependent(*x, **branches):
    if "tpu" not in branches:
      return real(*x, **branches)
    return branches["tpu"](*x)

  monkeypatch.setattr(jax.lax, "platform_dependent", dependent)


def until(check: Callable[[], object], patience_s: float = 60) -> None:
  """Waits for what another thread or process does, and fails if it does not."""
  end = time.monotonic() + patience_s
  while not check():
    assert time.monotonic() < end, f"not within {patience_s} s"
    time.sleep(0.005)


def script(module, *argv: str, stream=None) -> tuple[int, str, str]:
  """Exit status, stdout and stderr of a script of launch, in this process."""
  from launch.shared import common

  out, err = io.StringIO(), stream or io.StringIO()
  name = module.__name__.rpartition(".")[2]
  if "words" in inspect.signature(module.run).parameters:
    parsed = common.parse_words(name, module.define, argv)
  else:
    parsed = (common.parse(name, module.define, argv),)
  status = module.run(*parsed, stdout=out, stderr=err)
  return status, out.getvalue(), err.getvalue()


def check_unequal_rows(folder, name: str, *, cache_kind: str, prefill: str):
  """Each row over shards continues as if it were alone, on one device."""
  import ringjax as rj
  from tests import checkpoints

  folder, mesh = checkpoints.write(name, folder), make_mesh(4, "auto")
  sharded, single = (rj.models.load(folder, mesh=x) for x in (mesh, None))
  expected = checkpoints.expected(name)
  prompts = [expected.prompt[0], expected.prompt[1][:7]]
  new = lambda model, prompts, **how: rj.infer.generate(
    model, prompts, max_new_tokens=5, cache_kind=cache_kind, **how
  )
  answers = new(sharded, prompts, prefill=prefill, mesh=mesh)
  for row, prompt in zip(answers, prompts, strict=True):
    np.testing.assert_array_equal(row, new(single, [prompt])[0])
  if cache_kind == "dense":
    np.testing.assert_array_equal(answers[0], expected.greedy[0, :5])


def refused(kind, call, *words):
  """What `call` raises: of a kind, short, and with these words."""
  with pytest.raises(kind) as caught:
    call()
  text = str(caught.value)
  assert len(text) < MESSAGE_LIMIT, text
  for word in words:
    assert word in text, text
  return caught.value


def poisoned(model, *ids):
  """A copy of a model of which the embeddings of some ids are NaN."""
  graph, state = nnx.split(model)

  def planted(path, x):
    if "embed" not in jax.tree_util.keystr(path) or x.ndim != 2:
      return x
    return x.at[np.asarray(ids)].set(np.nan)

  state = jax.tree_util.tree_map_with_path(planted, state)
  return nnx.merge(graph, state)
