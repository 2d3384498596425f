"""Drafts by the layer of the model that predicts one token further (MTP).

Guarantees: as with all drafters no token changes, but where rounding decides.
The target's cache is read and not changed, whatever its kind.
Cost: for each drafted token one layer and the head; for a tree a pass for each
depth, of the tokens that it continues. The target's calls compute
the layer's keys of the tokens that they read, so that a draft reads no text.
Memory: keys of the drafted tokens of a round; the layer's other keys are in the
target's cache.
Ref: DeepSeek-AI 2024, arXiv 2412.19437.

The first drafted token follows from the model's hidden state of the token
before the last chosen one, which the cache has, each later one from the
layer's own output. In a tree it is the output for the token that it follows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax.errors import OptionError
from ringjax.infer.decode import DecodeState
from ringjax.infer.speculate.draft_programs import TreeNodes, drafted_by
from ringjax.infer.speculate.drafter import (
  Draft,
  Drafting,
  Target,
  TreeDrafter,
  TreeShape,
  width_of,
)
from ringjax.kv.base import KV, HeldKeys
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.nn.draft_layers.predict_layer import PredictLayer
from ringjax.nn.sharding_context import CachedAttention
from ringjax.nn.tokens import Tokens
from ringjax.ops.ancestors import tree_coords
from ringjax.ops.attention.cached.views import ContiguousView, KVView
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.rope import Rotation
from ringjax.parallel.programs import bounded
from ringjax.typing import ArrayLeaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictDraft(TreeDrafter):
  """Drafts by the model's layer that predicts one token further.

  The layer is applied again and again, each time to the token that it has
  drafted.
  """

  name: ClassVar[str] = "mtp"

  count: int = 2

  def check(self, target: Transformer) -> None:
    layer = target.config.predicts
    if layer is None or layer.taps:
      described = "without a layer that predicts further tokens"
      instead = "lookup"
      if layer is not None:
        described = "with a head that reads several layers"
        instead = layer.drafter
      raise OptionError(
        "speculate",
        f"'mtp', for a {target.config.family} {described}",
        "a model that was loaded with its layer",
        "load it with rj.models.load(folder, predict_layers=True), or draft "
        f"with speculate={instead!r}",
      )
    self._check_placed(target)

  def _check_placed(self, target: Transformer) -> None:
    """Refuses a model with layers that are not on the devices."""
    if target.stack.placed is not None:
      raise OptionError(
        "speculate",
        f"{self.name!r}, for a model with layers that are not on the devices",
        "all layers on the devices",
        "leave placement out, or draft with speculate='lookup'",
      )

  @property
  def program(self) -> Callable[..., Any]:
    """Program that drafts for rows of the target, see `predicted`."""
    return predicted

  def begin(self, target: Target) -> Drafting:
    return _Predicting(self, target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadDraft(PredictDraft):
  """Drafts by a head that a model has, stored in another folder.

  Attributes:
    model: Folder of the head, which scripts add to the model that they load; a
      model in Python has it by `load(folder, target)` of `rj.models.eagle3` or
      `rj.models.dflash`.
  """

  name: ClassVar[str] = ""
  # Name of such heads in texts, and the class of their layers.
  title: ClassVar[str] = ""
  layer: ClassVar[type[PredictLayer]] = PredictLayer

  model: str = ""

  def check(self, target: Transformer) -> None:
    layer = target.config.predicts
    if not isinstance(layer, self.layer):
      folder = repr(self.model) if self.model else "folder"
      raise OptionError(
        "speculate",
        f"{self.name!r}, for a {target.config.family} without {self.title}",
        "a model with its head",
        f"pass rj.models.{self.name}.load({folder}, model), or draft with "
        "speculate='lookup'",
      )
    head: Any = layer
    loaded = head.folder.path
    if self.model and self.model != loaded:
      raise OptionError(
        "model",
        f"{self.model}, for a model whose head is "
        + (f"that of {loaded}" if loaded else "a new one"),
        "the folder of the model's head",
        "leave model out, or load the target with that head",
      )
    self._check_placed(target)


class _Predicting:
  """Drafting of one call, which keeps nothing between rounds."""

  def __init__(self, drafter: PredictDraft, target: Target):
    session = target.session
    self._drafter, self._target = drafter, target
    self._attend = CachedAttention(mesh=session.mesh, axis=session.axis)
    self._length = jnp.int32(session.capacity)

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    del new
    target, drafter = self._target, self._drafter
    shape = drafter.shape(width_of(most, drafter.count))
    tokens, probs, parents = drafter.program(
      target.model,
      self._attend,
      shape,
      target.drawn,
      target.sampler,
      target.session.cache,
      state.token,
      state.pos,
      most > 0,
      state.seen,
      self._length,
    )
    count = np.where(most > 0, drafter.nodes, 0)
    if isinstance(shape, int):
      count = np.minimum(most, shape)
    return Draft(tokens, count.astype(np.int32), parents, probs)


@dataclasses.dataclass(frozen=True)
class _TreeView(ContiguousView):
  """Keys of a tree's tokens, at their coordinates within the tree."""

  def of_tree(self, drafted: Coords, mask: Mask) -> ContiguousView:
    return ContiguousView(
      self.k, self.v, self.at, self.layer, mask, drafted, self.widths
    )


class _DraftedKeys(NamedTuple):
  """A layer's part of a cache, with keys of drafted tokens next to it.

  Fields:
    target_cache: The layer's part of the target's cache, which is not changed.
    k: Keys of the drafted tokens, [B, K, n, H].
    v: Values of the drafted tokens, [B, K, n, J].
    at: Coordinates of the drafted tokens, [B, n].
    number: Index of the first token that is appended, int32.
    shards: Number of shards of the target's cache.
    tree: Coordinates of all drafted tokens within their tree, [B, m]; None for
      a chain.
  """

  target_cache: Any
  k: Shaped[Array, "B K n H"]
  v: Shaped[Array, "B K n J"]
  at: Coords
  number: Int[Array, ""]
  shards: int
  tree: Coords | None = None

  @property
  def slots(self) -> tuple[()]:
    """Nothing: no array returns to the cache."""
    return ()

  @property
  def fresh(self) -> None:
    """No keys of the call alone."""
    return

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> _DraftedKeys:
    put = lambda old, new, axis: lax.dynamic_update_slice_in_dim(
      old, new.astype(old.dtype), self.number, axis
    )
    return self._replace(
      target_cache=self.target_cache.for_reading(rotation),
      k=put(self.k, rotation.own(k), 2),
      v=put(self.v, v, 2),
      at=Coords(put(self.at.pos, at.pos, 1), put(self.at.seg, at.seg, 1)),
    )

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> _DraftedKeys:
    del rotated, plain
    return self

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    del apart
    if self.tree is None:
      drafted = KV(self.k, self.v, self.at).view(self.shards)
      return (*self.target_cache.views(), drafted)
    empty = [(0, 0), (0, self.k.shape[2] - self.tree.pos.shape[1])]
    at = Coords(*(jnp.pad(x, empty) for x in self.tree))
    drafted = KV(self.k, self.v, at).view(self.shards)
    tree_view = _TreeView(drafted.k, drafted.v, drafted.at, drafted.layer)
    return (*self.target_cache.views(), tree_view)


class _ChainState(NamedTuple):
  """State between the drafted tokens of a round.

  Fields:
    hidden: Hidden states that later predictions read, [B, m, D]: of a chain the
      last one, of a tree that of the text and those after each of its tokens.
    keys: Keys and values of the drafted tokens, of each mixer.
    at: Coordinates of the drafted tokens, [B, n].
    number: Number of drafted tokens so far, int32.
  """

  hidden: Float[Array, "B m D"]
  keys: tuple[tuple[Array, Array], ...]
  at: Coords
  number: Int[Array, ""]


class _PredictCall(NamedTuple):
  """Arguments of a drafting program, see `draft_programs.DraftCall`."""

  model: Transformer
  attend: CachedAttention
  drawn: bool
  sampler: Callable[..., Any]
  target_cache: HeldKeys
  live: Int[Array, "B 1"]
  pos: Int[Array, " B"]
  at: Int[Array, " B"]
  seen: Any
  length: Int[Array, ""]

  def read(
    self, tokens: Int[Array, "B 1"], pos: Int[Array, "B 1"], cache: _ChainState
  ) -> tuple[Float[Array, "B 1 V"], _ChainState]:
    """Predicts the token after the given one, at `pos`."""
    shape = tokens.shape
    places = tokens_of(
      self.model, self.attend, shape, pos, self.live, self.length
    )
    logits, handed, cache = self._predicted(tokens, places, cache.hidden, cache)
    return logits, cache._replace(hidden=handed)

  def read_depth(
    self, nodes: TreeNodes, first: int, cache: _ChainState
  ) -> tuple[Float[Array, "B w V"], _ChainState]:
    """Predicts the tokens after the last ones of a tree."""
    # The last chosen token is the root: its key is in no cache, either.
    parents = jnp.pad(nodes.parents + 1, ((0, 0), (1, 0)), constant_values=-1)
    pos = self.pos[:, None] + jnp.pad(
      nodes.offsets(), ((0, 0), (1, 0)), constant_values=-1
    )
    return self._read_last(nodes.tokens[:, first:], parents, pos, cache)

  def read_root(
    self, token: Int[Array, "B 1"], cache: _ChainState
  ) -> tuple[Float[Array, "B 1 V"], _ChainState]:
    """Predicts the tokens after the last chosen one, the root of a tree."""
    parents = jnp.full(token.shape, -1, jnp.int32)
    return self._read_last(token, parents, self.pos[:, None] - 1, cache)

  def _read_last(
    self,
    tokens: Int[Array, "B w"],
    parents: Int[Array, "B m"],
    pos: Int[Array, "B m"],
    cache: _ChainState,
  ) -> tuple[Float[Array, "B w V"], _ChainState]:
    """Predicts the tokens after the last w of the m tokens of a tree."""
    model, attend, shape = self.model, self.attend, tokens.shape
    first = parents.shape[1] - shape[1]
    seg = jnp.broadcast_to(self.live, parents.shape)
    tree = tree_coords(parents, Coords(pos, seg))
    last = lambda x: x[:, first:]
    places = tokens_of(model, attend, shape, last(pos), last(seg), self.length)
    places.tree = Coords(*map(last, tree))
    above = last(parents)[..., None] + 1
    hidden = jnp.take_along_axis(cache.hidden, above, 1)
    logits, handed, state = self._predicted(tokens, places, hidden, cache, tree)
    hidden = jnp.concatenate([cache.hidden, handed], 1)
    return logits, state._replace(hidden=hidden)

  def _predicted(
    self,
    tokens: Int[Array, "B w"],
    places: Tokens,
    hidden: Float[Array, "B w D"],
    cache: _ChainState,
    tree: Coords | None = None,
  ) -> tuple[Float[Array, "B w V"], Float[Array, "B w D"], _ChainState]:
    """Predicts the tokens after given ones.

    Args:
      tokens: Token ids.
      places: Their coordinates and rotations.
      hidden: Hidden state that each prediction reads.
      cache: State of the calls before.
      tree: Coordinates of all tokens within their tree, or None.

    Returns:
      Logits, the hidden states that later predictions read, and the state with
      the tokens' keys.
    """
    model, attend, target_cache = self.model, self.attend, self.target_cache
    block, spec = model.predict_block, model.config.predicts
    assert spec is not None
    model.embedded(jnp.maximum(tokens, 0), places)
    first = len(model.kinds) - len(spec.mixers) + 1
    parts: Any = tuple(
      _DraftedKeys(
        target_cache.layer(kind, target_cache.slots[kind], jnp.int32(0)),
        k,
        v,
        cache.at,
        cache.number,
        attend.size,
        tree,
      )
      for kind, (k, v) in enumerate(cache.keys, first)
    )
    context: Any = attend
    g, layers = block.predicted(hidden, places, parts, context)
    normed = block.normed(g, model.norm)
    logits = model.predicted_head(model.head_dtype(normed))
    handed = normed if spec.hands_normed else g
    state = cache._replace(
      keys=tuple((layer.k, layer.v) for layer in layers),
      at=layers[0].at,
      number=cache.number + tokens.shape[1],
    )
    handed = handed.astype(cache.hidden.dtype)
    return attend.everywhere(logits), handed, state


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def predicted(
  model: Transformer,
  attend: CachedAttention,
  shape: int | TreeShape,
  drawn: bool,
  sampler: Callable[..., Any],
  target_cache: HeldKeys,
  token: Int[Array | np.ndarray, " B"],
  pos: Int[Array | np.ndarray, " B"],
  live: Bool[Array | np.ndarray, " B"],
  seen: Bool[ArrayLeaf, "B V"] | None,
  length: Int[Array, ""],
) -> tuple[
  Int[Array, "B n"], Float[Array, "B n V"] | None, Int[Array, "B n"] | None
]:
  """Drafts a chain or a tree by the layer that predicts one token further.

  Args:
    model: Target model.
    attend: Cached attention over the shards of its cache.
    shape: Number of tokens of a chain, n, or the shape of a tree.
    drawn: Whether tokens are drawn, see `Target`.
    sampler: Sampler of the target, a pytree.
    target_cache: Cache of the target, which has the tokens before the last one.
    token: Last token of each row, int32 [B].
    pos: Position of the last token, int32 [B].
    live: Whether each row takes part, bool [B].
    seen: Ids that each row has, see `DecodeState`.
    length: Length of the whole context, for rotations.

  Returns:
    Drafted tokens, `NOT_FINITE` where the logits are not finite; the
    distributions that they were drawn from, or None; and the parents of a
    tree's tokens, or None.
  """
  spec = model.config.predicts
  assert spec is not None
  context = dataclasses.replace(
    attend, mesh=target_cache.mesh, axis=target_cache.axis
  )
  pos = jnp.asarray(pos, jnp.int32)
  alive = jnp.asarray(live).astype(jnp.int32)[:, None]
  call = _PredictCall(
    model,
    context,
    drawn,
    sampler,
    target_cache,
    alive,
    pos + 1,
    pos + 1,
    seen,
    length,
  )
  batch, kinds = pos.shape[0], len(model.kinds) - len(spec.mixers)
  places = tokens_of(model, context, (batch, 1), pos[:, None], alive, length)
  hidden_layer = target_cache.layer(
    kinds, target_cache.slots[kinds], jnp.int32(0)
  )
  hidden = spec.hidden.read(places.at, hidden_layer, places, context)
  # Of a tree, tokens that are continued, and the last chosen one.
  slots = shape if isinstance(shape, int) else shape.continued + 1
  zeros = lambda heads, dim: jnp.zeros((batch, heads, slots, dim), model.dtype)
  specs: Any = [mixer.cache_shape(1) for mixer in spec.mixers[1:]]
  state = _ChainState(
    hidden.astype(model.dtype),
    tuple(
      (
        zeros(shape_of_keys.heads, shape_of_keys.key),
        zeros(shape_of_keys.heads, shape_of_keys.value),
      )
      for shape_of_keys in specs
    ),
    Coords(*(jnp.zeros((batch, slots), jnp.int32) for _ in range(2))),
    jnp.int32(0),
  )
  last = jnp.asarray(token, jnp.int32)[:, None]
  if isinstance(shape, int):
    logits, state = call.read(last, pos[:, None], state)
  else:
    logits, state = call.read_root(last, state)
  draft, _ = drafted_by(call, shape, logits[:, 0], state)
  return context.everywhere(draft)
