"""What the kernels that read pages of a pool have in common.

A kernel's test file has a function `call(**options)` that makes the arguments
of a call: queries, view and `ScoreArgs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.errors import OptionError
from ringjax.ops import kernel_choice
from ringjax.ops.ancestors import MOST_DRAFTED, Ancestors, tree_coords
from ringjax.ops.attention.kernels import auto_kernel
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.mask import Causal, Coords, Prefix

Call = Callable[..., tuple[Any, Any, Any]]


def declined(kernel: type) -> dict[str, dict[str, Any]]:
  """Calls that each of the kernels declines, by words of the reason."""
  return {
    "float16": dict(dtype=jnp.float16),
    "ALiBi": dict(terms=Terms(slopes=jnp.ones((2, 3)))),
    "dropout": dict(scores=Scores(scale=1.0, dropout_rate=0.1)),
    "numbers of each row": dict(mask=Prefix(jnp.array([3, 60, 2, 1, 5]))),
    "32 pages a tile": dict(kernel=kernel(1024, interpret=True)),
    "multiples of 128": dict(kernel=kernel(64)),
  }


def check_declines(
  call: Call, kernel: Any, words: str, changes: dict[str, Any]
) -> None:
  """A changed call is declined with these words, and refused if made."""
  given = {
    name: changes[name] for name in {"mask", "dtype", "queries"} & {*changes}
  }
  q, view, args = call(**given)
  view = changes.get("view", lambda x: x)(view)
  for name in {"scores", "terms"} & {*changes}:
    args = args._replace(**{name: changes[name]})
  kernel = changes.get("kernel", kernel)
  assert words in kernel.decline(q, view, args)
  with pytest.raises(OptionError, match=words):
    kernel.decode(q, view, args)


def with_tree(args: tuple[Any, Any, Any], before: Any) -> tuple[Any, Any, Any]:
  """A call whose five queries of a row are a tree after `before` tokens.

  Args:
    args: Queries, view and `ScoreArgs`.
    before: Number of tokens before the tree of each row.
  """
  q, view, rest = args
  before = np.asarray(before)[:, None]
  parents = jnp.asarray([[-1, 0, 0, 2, 1]] * len(before), jnp.int32)
  depth = np.array([[0, 1, 1, 2, 2]])
  coords = lambda *x: Coords(*(jnp.asarray(a, jnp.int32) for a in x))
  drafted = tree_coords(parents, coords(before + depth, 0 * before + depth + 1))
  slot = np.arange(view.shape[2])[None]
  # A range from 0 to the last place: an ancestor of all drafted tokens.
  text = coords(0 * before + slot, (slot < before) * MOST_DRAFTED)
  new = (slot >= before) & (slot < before + depth.size)
  index = jnp.asarray(np.clip(slot - before, 0, depth.size - 1))
  at = Coords(
    *(
      jnp.where(new, jnp.take_along_axis(tree, index, 1), x)
      for tree, x in zip(drafted, text, strict=True)
    )
  )
  mask = Causal() & Ancestors()
  view = dataclasses.replace(view, at=at).of_tree(drafted, mask)
  return q, view, rest._replace(context=Context(drafted, at, mask))


def check_unseen(call: Call, kernel: Any) -> None:
  """What no query sees does not matter, even if it is no number.

  What is seen reaches its row alone.
  """
  q, view, args = call()
  decode = jax.jit(lambda view: kernel.decode(q, view, args))
  want = decode(view)
  unused = np.setdiff1d(np.arange(view.k.shape[1]), np.asarray(view.table))
  # Entries of missing pages are read as page 0.
  bad = lambda x, n: x.at[:, n].set(jnp.nan)
  gone = dataclasses.replace(view, k=bad(view.k, unused), v=bad(view.v, unused))
  for a, b in zip(decode(gone), want, strict=True):
    np.testing.assert_array_equal(a, b)
  own = int(view.table[1, 0])
  results = decode(dataclasses.replace(view, v=bad(view.v, own))).acc
  assert np.isnan(results[1]).all()
  others = np.array([0, 2, 3, 4])
  np.testing.assert_array_equal(results[others], want.acc[others])


def check_choice(call: Call, kernel: type) -> None:
  """`AutoKernel` takes it on a TPU, and loops on a CPU; it passes its check."""
  kernel_choice._fault.cache_clear()
  args = call(dtype=jnp.bfloat16)
  ours = auto_kernel.AutoKernel(platform="tpu", chip="tpu-v5e")
  assert ours.choose_decode(*args).algorithm == kernel(chip="tpu-v5e")
  chosen = auto_kernel.AutoKernel(platform="cpu").choose_decode(*args)
  assert isinstance(chosen.algorithm, auto_kernel.Loops)
  error = auto_kernel._compare_decodes(kernel(interpret=True))
  assert error < kernel_choice.ALLOWED_ERROR
