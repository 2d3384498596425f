"""Elastic sequence parallelism: more devices read a prompt than answer it.

`ElasticSession.read` reads prompts by a ring over all instances. Every key
passes every instance on its way, and each keeps those that a plan gives it, so
that afterwards fewer instances answer (`regroup`) and no key has moved. To
answer faster, or with more slots, instances join: old keys stay, the new tokens
of a row are on the row's master.

Guarantees: the same tokens as on one device, whatever the plan and the groups.
Cost: reading sends what the ring sends, byte for byte; regrouping sends no key.
A decode step sends each row's queries to the group and its partials back.
Programs: one to read and one to decode for each group of devices and length of
prompts (few, see `prefill.padded`); a plan is data and compiles nothing.
Memory: each instance has the weights and `slots` tokens of each row.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526. Which requests get
which instances decides `rj.serve.cluster.ElasticScheduler`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from ringjax.checks import integer, positive_int
from ringjax.errors import MeshError, OptionError, PromptError
from ringjax.infer import decode, inputs
from ringjax.infer.finite import NotFiniteRows
from ringjax.infer.generate import Generated
from ringjax.infer.inputs import Prompts
from ringjax.infer.prefill import Prefill, padded, read
from ringjax.infer.retained import RetainedCache, RetainingParallel
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.session import check_devices, place_of
from ringjax.kv.cache import KVCache, LayerCacheSpec
from ringjax.kv.master_slots import MasterSlots
from ringjax.models.transformer import Transformer
from ringjax.models.weight_placement import refuse_placed
from ringjax.nn.sharding_context import MultiMaster, ShardingContext
from ringjax.nn.stack import keeps
from ringjax.ops.mask import Coords
from ringjax.parallel.layout import Striped
from ringjax.parallel.local import on_part

# Which instance keeps each token of a row, by the tokens' positions.
Owners = Int[np.ndarray, " _"] | Sequence[int]


def owners_of(counts: Sequence[int]) -> Int[np.ndarray, " T"]:
  """The plan of one row whose instances keep consecutive ranges.

  Args:
    counts: tokens that each instance keeps, in the order of the instances;
      `fewest_instances` of `rj.serve.cluster` finds such.
  """
  return np.repeat(np.arange(len(counts)), np.asarray(counts, np.int64))


class _ElasticRows(NamedTuple):
  """What decoding knows of the rows between calls; see `decode.DecodeState`.

  Fields:
    token: int32 [B].
    pos: int32 [B].
    done: bool [B].
    seen: bool [B, V].
  """

  token: np.ndarray
  pos: np.ndarray
  done: np.ndarray
  seen: np.ndarray


class ElasticSession:
  """Prompts that a group of instances reads, and others or fewer answer.

  An instance is a place on the sequence's axis of the mesh: a device, or those
  that share its heads.

  Attributes:
    model: with all weights on each instance.
    mesh: of all instances.
    axis: the sequence's axis.
    members: the instances of the group at hand, ascending but for the first
      one if `regroup` was told which that is.
    cache: of the group, once prompts are read.
  """

  def __init__(
    self,
    model: Transformer,
    slots: int,
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    members: Sequence[int] | None = None,
  ):
    """Makes one.

    Args:
      model: placed on the mesh.
      slots: tokens of a row that each instance has room for.
      mesh: of all instances; default: the model's.
      axis: that the instances are on; default "seq" if the mesh has one.
      members: the instances that read first; default: all.

    Raises:
      MeshError: no such axis, or a mesh that is not the model's or shards
        batches too.
      OptionError: a model with layers whose keys do not travel: recurrent
        ones, and those that cache latents; or one whose weights are placed.
    """
    self.slots = positive_int("slots", slots)
    mesh, axis = place_of(mesh, axis, model)
    if mesh is None or axis is None:
      raise MeshError(
        "mesh",
        "none, or one without the sequence's axis",
        "a mesh whose axis 'seq' has the instances",
        "pass mesh=rj.make_mesh((-1,), ('seq',)), and the model on it",
      )
    if ShardingContext(mesh=mesh, axis=axis).data_size > 1:
      raise MeshError(
        "mesh",
        f"{dict(mesh.shape)}, which shards batches",
        "axes of the sequence and of heads",
        "use a session for each part of the batch",
      )
    check_devices(model, mesh)
    refuse_placed(model, "use it in groups", "load it onto the devices")
    for kind in model.kinds:
      if not isinstance(kind, LayerCacheSpec) or not kind.value:
        raise OptionError(
          "model",
          f"a {model.config.family} with recurrent layers or cached latents",
          "keys and values that travel, in every layer",
          "use rj.infer.generate",
        )
    if not all(map(keeps, model.config.layers)):
      raise OptionError(
        "model",
        f"a {model.config.family}, whose layers read each other's keys",
        "keys that one layer reads alone",
        "use rj.infer.generate",
      )
    self.model, self.mesh, self.axis = model, mesh, axis
    self.cache: KVCache | None = None
    self.members = self._checked(
      range(self.instances) if members is None else members
    )
    # Behind the prompts, until a token was chosen by them.
    self._logits: np.ndarray | None = None
    self._rows: _ElasticRows | None = None
    self._marked = NotFiniteRows()
    self._length = np.array(0, np.int32)

  @property
  def instances(self) -> int:
    """How many there are."""
    return self.mesh.shape[self.axis]

  @property
  def used(self) -> Int[np.ndarray, "B R"]:
    """Slots of each row that each member has in use."""
    return np.asarray(self._filled().held.used)

  def read(
    self,
    prompts: Prompts,
    owners: Sequence[Owners],
    *,
    members: Sequence[int] | None = None,
  ) -> Float[np.ndarray, "B V"]:
    """Reads prompts with the group at hand: logits behind them.

    Args:
      prompts: int32 [B, T], or B sequences of ids of different lengths.
      owners: for each prompt the instance that keeps each of its tokens, by
        position; see `owners_of`.
      members: the instances that then answer, among them all that keep a
        token; default: just these.

    Raises:
      PromptError: prompts that are none, or more tokens for an instance than
        it has slots.
      OptionError: owners that are not of the group, or not one for each token;
        prompts that have been read before.
    """
    if self.cache is not None:
      raise OptionError(
        "prompts",
        "a second call",
        "one batch of prompts for a session",
        "make another session, which compiles nothing",
      )
    ids = inputs.prompts(prompts, self.model.config.vocab)
    lengths = np.array([p.size for p in ids])
    plan = self._plan(owners, lengths)
    keeping = np.unique(np.concatenate(plan)).tolist()
    then = self._checked(keeping if members is None else members)
    if not {*keeping} <= {*then}:
      raise self._bad_owners(f"instances {keeping}, of which not all answer")
    mesh, size = self._submesh(self.members), len(self.members)
    width = padded(int(lengths.max()), size)
    attend = RetainingParallel(mesh=mesh, axis=self.axis, layout=Striped())
    how = Prefill(
      name="striped", attend=attend, chunk=None, width=width, layout=Striped(),
      slots=width // size, why="keys are kept on their way around the ring",
    )  # fmt: skip
    order = how.layout.padded_order(width, size)
    cache, place = self._planned(plan, order, mesh)
    (call,) = how.calls(ids, np.zeros(len(ids), np.int64))
    self._length = lengths.max().astype(np.int32)
    if any(rope.scaling.by_length for rope in self.model.config.ropes):
      self._length = lengths.astype(np.int32)
    logits, kept = read(
      on_part(self.model, mesh, self.axis),
      attend,
      jnp.asarray(call.tokens),
      None,
      jnp.asarray(call.seg),
      RetainedCache(cache, place),
      jnp.asarray(call.rows),
      jnp.asarray(self._length),
    )
    self.cache, self._logits = kept.cache, np.asarray(logits)
    self._marked = NotFiniteRows()
    found = self._logits
    seen = np.zeros((len(ids), self.model.config.vocab), bool)
    for row, prompt in zip(seen, ids, strict=True):
      row[prompt] = True
    self._rows = _ElasticRows(
      token=np.zeros(len(ids), np.int32),
      pos=lengths.astype(np.int32),
      done=np.zeros(len(ids), bool),
      seen=seen,
    )
    self.regroup(then)
    return found

  def regroup(
    self, members: Sequence[int], *, first: int | None = None
  ) -> None:
    """Lets these instances answer from now on; no key moves.

    Those that join have empty slots and are masters of some rows.

    Args:
      members: the instances.
      first: of these the master of the first rows; default: the least.

    Raises:
      OptionError: an instance would leave whose keys are needed.
    """
    cache, then = self._filled(), self._checked(members)
    if first is not None:
      if first not in then:
        raise OptionError(
          "first", first, f"one of {list(then)}", "pass one of the members"
        )
      then = (first, *(n for n in then if n != first))
    if then == self.members and isinstance(cache.held, MasterSlots):
      return
    used = self.used
    for n, instance in enumerate(self.members):
      if instance not in then and used[:, n].any():
        raise OptionError(
          "members",
          f"{list(then)} without instance {instance}, which holds "
          f"{int(used[:, n].sum())} tokens",
          "all instances that hold tokens",
          "keep it, or give it no tokens in the plan of read()",
        )
    mesh = self._submesh(then)
    slots = on_part(cache.slots, mesh, self.axis, dimension=3)
    at = on_part(cache.held.at, mesh, self.axis, dimension=1)
    now = np.zeros((cache.batch, len(then)), np.int32)
    for n, instance in enumerate(self.members):
      if instance in then:
        now[:, then.index(instance)] = used[:, n]
    count = jax.device_put(now, NamedSharding(mesh, P()))
    held = MasterSlots(
      at=Coords(*at), used=count, before=count + 0, mesh=mesh, axis=self.axis
    )
    self.cache = dataclasses.replace(
      cache, slots=slots, held=held, mesh=mesh, axis=self.axis
    )
    self.members = then

  def decode(
    self,
    max_new_tokens: int,
    *,
    sampler: Callable[..., Any] | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
  ) -> Generated:
    """The next tokens of each row; later calls go on behind them.

    Args:
      max_new_tokens: of each row, at most.
      sampler: chooses a token from logits; default `Greedy()`.
      stop_ids: end a row, for later calls too.
      pad_id: fills up rows that ended.

    Raises:
      PromptError: a master has too few free slots.
      NotFiniteLogitsError: the logits of some rows are NaN or infinite; raised
        when the other rows have their tokens, which it carries, and by later
        calls too.
    """
    count = positive_int("max_new_tokens", max_new_tokens)
    integer("pad_id", pad_id, least=-(2**31), most=2**31 - 1)
    cache = self._filled()
    batch, size = cache.batch, len(self.members)
    rows = -(-batch // size)
    # The prompts' logits choose the first token, which no step has read.
    reads = count - 1 if self._logits is not None else count
    masters = np.arange(batch) // rows
    free = self.slots - self.used[np.arange(batch), masters]
    if reads > free.min():
      raise PromptError(
        "max_new_tokens",
        f"{count}, where a row's master has {int(free.min())} slots left",
        f"at most {int(free.min()) + count - reads}",
        "let another instance join: regroup([...])",
      )
    spare = rows * size - batch
    return self._decoded(count, spare, sampler or Greedy(), stop_ids, pad_id)

  def _decoded(
    self,
    count: int,
    spare: int,
    sampler: Callable[..., Any],
    stop_ids: Sequence[int],
    pad_id: int,
  ) -> Generated:
    cache, state, mesh = self._filled(), self._rows, self._submesh(self.members)
    assert state is not None
    attend = MultiMaster(mesh=mesh, axis=self.axis)
    model = on_part(self.model, mesh, self.axis)
    needs = getattr(sampler, "needs_seen", False)
    sampler, stops = traced(sampler), decode.stop_ids(stop_ids)
    fill = lambda x, value: np.pad(
      np.asarray(x),
      ((0, spare), *((0, 0),) * (np.ndim(x) - 1)),
      constant_values=value,
    )
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
    seen = put(fill(state.seen, False)) if needs else None
    first = self._logits is not None
    if first:
      logits, pos = put(fill(self._logits, 0)), put(fill(state.pos, 0))
      now = decode.first(sampler, logits, pos, seen, stops)
      now = now._replace(done=now.done | put(fill(state.done, True)))
    else:
      now = decode.DecodeState(
        put(fill(state.token, 0)), put(fill(state.pos, 0)),
        put(fill(state.done, True)), seen,
      )  # fmt: skip
    length = self._length
    length = fill(length, 1) if length.ndim else length
    batch = cache.batch
    out = np.full((batch, count), pad_id, np.int32)
    sizes = np.zeros(batch, np.int32)
    ended = np.asarray(state.done)
    made, self.cache = self.cache, None
    for n in range(count):
      if ended.all():
        out[:, n:] = pad_id
        break
      # Until all is known again the session has no cache: of a call that is
      # interrupted nobody knows which tokens it holds.
      if n or not first:
        now, made = decode.step(
          model, attend, sampler, made, now, stops, jnp.asarray(length)
        )
      token, done = (x[:batch] for x in jax.device_get((now.token, now.done)))
      marked = self._marked.note(token, state.pos + sizes + (not first), ~ended)
      ended = ended | marked
      out[:, n] = np.where(ended, pad_id, token)
      sizes += ~ended
      state.seen[np.flatnonzero(~ended), token[~ended]] = True
      ended = done
    self.cache, self._logits = made, None
    kept = (np.array(x)[:batch] for x in now[:3])
    self._rows = _ElasticRows(*kept, seen=state.seen)
    new = Generated(tokens=out, lengths=sizes)
    self._marked.check(self.model.dtype, new)
    return new

  # -- what the calls above are made of

  def _filled(self) -> KVCache:
    if self.cache is None:
      raise OptionError(
        "session",
        "one that has read nothing",
        "a session with prompts",
        "call read(prompts, owners) first",
      )
    return self.cache

  def _checked(self, members: Sequence[int]) -> tuple[int, ...]:
    found = sorted({int(n) for n in members})
    if not found or found[0] < 0 or found[-1] >= self.instances:
      raise OptionError(
        "members",
        f"{[*members]}",
        f"some of the instances 0 to {self.instances - 1}",
        "name those that are to be a group",
      )
    return tuple(found)

  def _submesh(self, members: Sequence[int]) -> Mesh:
    along = self.mesh.axis_names.index(self.axis)
    return Mesh(
      np.take(self.mesh.devices, members, along),
      self.mesh.axis_names,
      axis_types=self.mesh.axis_types,
    )

  def _bad_owners(self, got: str) -> OptionError:
    return OptionError(
      "owners",
      got,
      f"for each token of each prompt one of the instances {self.members}",
      "pass owners_of(counts) of each prompt",
    )

  def _plan(
    self, owners: Sequence[Owners], lengths: np.ndarray
  ) -> list[np.ndarray]:
    """The owners, checked: int [T] of each row."""
    plan = [np.asarray(row) for row in owners]
    sizes = [row.size for row in plan if row.ndim == 1]
    if sizes != lengths.tolist():
      raise self._bad_owners(f"{sizes} for prompts of {lengths.tolist()}")
    for number, row in enumerate(plan):
      if not np.isin(row, self.members).all():
        raise self._bad_owners(f"instances {np.unique(row).tolist()}")
      most = int(np.bincount(row).max())
      if most > self.slots:
        raise PromptError(
          "owners",
          f"{most} tokens of prompt {number} for one instance",
          f"at most its {self.slots} slots",
          "give some to another instance, or make a session of more slots",
        )
    return plan

  def _planned(
    self, plan: list[np.ndarray], order: np.ndarray, mesh: Mesh
  ) -> tuple[KVCache, jax.Array]:
    """An empty cache whose coordinates follow a plan, and tokens' slots."""
    size, batch = len(self.members), len(plan)
    place = np.full((batch, order.size), -1, np.int32)
    pos, seg = np.zeros((2, batch, size * self.slots), np.int32)
    used = np.zeros((batch, size), np.int32)
    for row, owners in enumerate(plan):
      # The tokens of an owner are in its first slots, by position.
      member = np.searchsorted(self.members, owners)
      slot = np.empty(owners.size, np.int64)
      for n in range(size):
        mine = np.flatnonzero(member == n)
        slot[mine] = n * self.slots + np.arange(mine.size)
        used[row, n] = mine.size
      pos[row, slot], seg[row, slot] = np.arange(owners.size), 1
      real = (order >= 0) & (order < owners.size)
      place[row, real] = slot[order[real]]
    cache = self.model.init_cache(
      batch,
      size * self.slots,
      sharding=ShardingContext(mesh=mesh, axis=self.axis),
    )
    put = lambda x, like: jax.device_put(x, like.sharding)
    held, everywhere = cache.held, NamedSharding(mesh, P())
    at = Coords(put(pos, held.at.pos), put(seg, held.at.seg))
    count = jax.device_put(used, everywhere)
    held = dataclasses.replace(held, at=at, used=count, before=count + 0)
    made = dataclasses.replace(cache, held=held)
    return made, jax.device_put(place, everywhere)
