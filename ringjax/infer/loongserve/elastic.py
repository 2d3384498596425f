"""Elastic sequence parallelism: more devices for prefill than for decoding.

`ElasticSession.read` reads prompts by a ring over all instances. Every key
passes every instance, and each keeps the keys that a plan assigns to it, so
that afterwards fewer instances decode (`regroup`) without moving a key. To
decode faster, or with more slots, instances join: old keys stay, the new tokens
of a row are stored on the row's master.

Guarantees: the same tokens as on one device, whatever the plan and the groups.
Cost: reading sends what the ring sends, byte for byte; regrouping sends no key.
A decode step sends each row's queries to the group and its partials back.
Programs: one to read and one to decode for each group of devices and length of
prompts (few, see `prefill.padded`); a new plan compiles nothing.
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
from ringjax.infer.loongserve.retaining_prefill import (
  RetainedCache,
  RetainingParallel,
)
from ringjax.infer.prefill import Prefill, padded, read
from ringjax.infer.sampling import Greedy, traced
from ringjax.infer.session import check_devices, place_of
from ringjax.kv.cache import KVCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.storage.master_slots import MasterSlots
from ringjax.models.transformer import Transformer
from ringjax.models.weights.weight_placement import refuse_placed
from ringjax.nn.sharding_context import MultiMaster, ShardingContext
from ringjax.nn.stack import keeps
from ringjax.ops.mask import Coords
from ringjax.parallel.layout import Striped
from ringjax.parallel.local_arrays import on_part

# Number of the instance that keeps each token of a row, by position.
Owners = Int[np.ndarray, " _"] | Sequence[int]


def owners_of(counts: Sequence[int]) -> Int[np.ndarray, " T"]:
  """Makes a row's plan in which instances keep consecutive ranges.

  Args:
    counts: Number of tokens that each instance keeps, in the order of the
      instances; `fewest_instances` of `rj.serve.cluster` computes them.

  Returns:
    Number of the instance that keeps each token, int [T].
  """
  return np.repeat(np.arange(len(counts)), np.asarray(counts, np.int64))


class _ElasticRows(NamedTuple):
  """State of the rows between decode calls; see `decode.DecodeState`.

  Fields:
    token: Last chosen tokens, int32 [B].
    pos: Positions of these tokens, int32 [B].
    done: Whether a row has ended, bool [B].
    seen: Ids that occurred in each row, bool [B, V].
  """

  token: np.ndarray
  pos: np.ndarray
  done: np.ndarray
  seen: np.ndarray


class ElasticSession:
  """A session whose group of instances may change between and after prompts.

  An instance is an index on the sequence axis of the mesh: a device, or the
  devices that share its heads.

  Attributes:
    model: Model with all weights on each instance.
    mesh: Mesh of all instances.
    axis: Mesh axis of the sequence.
    members: Numbers of the instances in the current group, ascending except a
      first one that was given to `regroup`.
    cache: Cache of the group, once prompts are read; else None.
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
    """Makes an empty session.

    Args:
      model: Model on the mesh.
      slots: Number of tokens of a row that each instance has room for.
      mesh: Mesh of all instances; default: the model's.
      axis: Mesh axis of the instances; default "seq" if the mesh has one.
      members: Instances that read the prompts; default: all.

    Raises:
      MeshError: If the mesh has no such axis, is not the model's, or shards
        batches, too.
      OptionError: If the model has layers whose keys cannot be sent around the
        ring (recurrent ones, cached latents), or its weights are placed.
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
          f"a {model.config.family} with recurrent layers, cached latents, or "
          "means of keys",
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
    # Logits after the prompts, until the first tokens are chosen.
    self._logits: np.ndarray | None = None
    self._rows: _ElasticRows | None = None
    self._marked = NotFiniteRows()
    self._length = np.array(0, np.int32)

  @property
  def instances(self) -> int:
    """Number of instances on the mesh."""
    return self.mesh.shape[self.axis]

  @property
  def used(self) -> Int[np.ndarray, "B R"]:
    """Number of slots of each row that each member has in use."""
    return np.asarray(self._filled().held.used)

  def read(
    self,
    prompts: Prompts,
    owners: Sequence[Owners],
    *,
    members: Sequence[int] | None = None,
  ) -> Float[np.ndarray, "B V"]:
    """Reads prompts with the current group; returns the logits after them.

    Args:
      prompts: Token ids, int32 [B, T], or B sequences of different lengths.
      owners: Number of the instance that keeps each token, by position, for
        each prompt; see `owners_of`.
      members: Instances that then decode, including all that keep a token;
        default: only those that keep a token.

    Raises:
      PromptError: If the prompts are invalid, or an instance gets more tokens
        than it has slots.
      OptionError: If owners are outside the group or not one for each token, or
        the session has read prompts already.
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
    answering = self._checked(keeping if members is None else members)
    if not {*keeping} <= {*answering}:
      raise self._bad_owners(f"instances {keeping}, of which not all answer")
    mesh, size = self._submesh(self.members), len(self.members)
    width = padded(int(lengths.max()), size)
    attend = RetainingParallel(mesh=mesh, axis=self.axis, layout=Striped())
    reading = Prefill(
      name="striped", attend=attend, chunk=None, width=width, layout=Striped(),
      slots=width // size, why="keys are kept on their way around the ring",
    )  # fmt: skip
    order = reading.layout.padded_order(width, size)
    cache, place = self._planned(plan, order, mesh)
    (call,) = reading.calls(ids, np.zeros(len(ids), np.int64))
    self._length = lengths.max().astype(np.int32)
    if any(rope.scaling.by_length for rope in self.model.config.ropes):
      self._length = lengths.astype(np.int32)
    logits, retained = read(
      on_part(self.model, mesh, self.axis),
      attend,
      jnp.asarray(call.tokens),
      None,
      jnp.asarray(call.seg),
      RetainedCache(cache, place),
      jnp.asarray(call.rows),
      jnp.asarray(self._length),
    )
    self.cache, self._logits = retained.cache, np.asarray(logits)
    self._marked = NotFiniteRows()
    prompt_logits = self._logits
    seen = np.zeros((len(ids), self.model.config.vocab), bool)
    for row, prompt in zip(seen, ids, strict=True):
      row[prompt] = True
    self._rows = _ElasticRows(
      token=np.zeros(len(ids), np.int32),
      pos=lengths.astype(np.int32),
      done=np.zeros(len(ids), bool),
      seen=seen,
    )
    self.regroup(answering)
    return prompt_logits

  def regroup(
    self, members: Sequence[int], *, first: int | None = None
  ) -> None:
    """Changes the group that decodes; no key moves.

    Instances that join have empty slots and are masters of some rows.

    Args:
      members: Numbers of the instances in the new group.
      first: Member that is the master of the first rows; default: the lowest.

    Raises:
      OptionError: If an instance that holds keys would leave.
    """
    cache, group = self._filled(), self._checked(members)
    if first is not None:
      if first not in group:
        raise OptionError(
          "first", first, f"one of {list(group)}", "pass one of the members"
        )
      group = (first, *(n for n in group if n != first))
    if group == self.members and isinstance(cache.held, MasterSlots):
      return
    used = self.used
    for n, instance in enumerate(self.members):
      if instance not in group and used[:, n].any():
        raise OptionError(
          "members",
          f"{list(group)} without instance {instance}, which holds "
          f"{int(used[:, n].sum())} tokens",
          "all instances that hold tokens",
          "keep it, or give it no tokens in the plan of read()",
        )
    mesh = self._submesh(group)
    slots = on_part(cache.slots, mesh, self.axis, dimension=3)
    at = on_part(cache.held.at, mesh, self.axis, dimension=1)
    used_slots = np.zeros((cache.batch, len(group)), np.int32)
    for n, instance in enumerate(self.members):
      if instance in group:
        used_slots[:, group.index(instance)] = used[:, n]
    count = jax.device_put(used_slots, NamedSharding(mesh, P()))
    master_slots = MasterSlots(
      at=Coords(*at), used=count, before=count + 0, mesh=mesh, axis=self.axis
    )
    self.cache = dataclasses.replace(
      cache, slots=slots, held=master_slots, mesh=mesh, axis=self.axis
    )
    self.members = group

  def decode(
    self,
    max_new_tokens: int,
    *,
    sampler: Callable[..., Any] | None = None,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
  ) -> Generated:
    """Generates the next tokens of each row; later calls continue after them.

    Args:
      max_new_tokens: Maximum number of new tokens in a row.
      sampler: Sampler that chooses a token from logits; default `Greedy()`.
      stop_ids: Ids that end a row, for later calls, too.
      pad_id: Id that pads rows that ended.

    Raises:
      PromptError: If a master has too few free slots.
      NotFiniteLogitsError: If logits of some rows are NaN or infinite; raised
        after the other rows have their tokens, which it carries, and by later
        calls, too.
    """
    count = positive_int("max_new_tokens", max_new_tokens)
    integer("pad_id", pad_id, least=-(2**31), most=2**31 - 1)
    cache = self._filled()
    batch, size = cache.batch, len(self.members)
    rows = -(-batch // size)
    # The first token comes from the prompts' logits and needs no step.
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
    needs_seen = getattr(sampler, "needs_seen", False)
    sampler, stops = traced(sampler), decode.stop_ids(stop_ids)
    fill = lambda x, value: np.pad(
      np.asarray(x),
      ((0, spare), *((0, 0),) * (np.ndim(x) - 1)),
      constant_values=value,
    )
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
    seen = put(fill(state.seen, False)) if needs_seen else None
    first = self._logits is not None
    if first:
      logits, pos = put(fill(self._logits, 0)), put(fill(state.pos, 0))
      decode_state = decode.first(sampler, logits, pos, seen, stops)
      decode_state = decode_state._replace(
        done=decode_state.done | put(fill(state.done, True))
      )
    else:
      decode_state = decode.DecodeState(
        put(fill(state.token, 0)), put(fill(state.pos, 0)),
        put(fill(state.done, True)), seen,
      )  # fmt: skip
    length = self._length
    length = fill(length, 1) if length.ndim else length
    batch = cache.batch
    out = np.full((batch, count), pad_id, np.int32)
    sizes = np.zeros(batch, np.int32)
    ended = np.asarray(state.done)
    step_cache, self.cache = self.cache, None
    for n in range(count):
      if ended.all():
        out[:, n:] = pad_id
        break
      # The session has no cache until the call ends: after an interruption it
      # is unknown which tokens the cache holds.
      if n or not first:
        decode_state, step_cache = decode.step(
          model,
          attend,
          sampler,
          step_cache,
          decode_state,
          stops,
          jnp.asarray(length),
        )
      token, rows_done = (
        x[:batch]
        for x in jax.device_get((decode_state.token, decode_state.done))
      )
      marked = self._marked.note(token, state.pos + sizes + (not first), ~ended)
      ended = ended | marked
      out[:, n] = np.where(ended, pad_id, token)
      sizes += ~ended
      state.seen[np.flatnonzero(~ended), token[~ended]] = True
      ended = rows_done
    self.cache, self._logits = step_cache, None
    row_state = (np.array(x)[:batch] for x in decode_state[:3])
    self._rows = _ElasticRows(*row_state, seen=state.seen)
    new = Generated(tokens=out, lengths=sizes)
    self._marked.check(self.model.dtype, new)
    return new

  # -- helpers of the methods above

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
    numbers = sorted({int(n) for n in members})
    if not numbers or numbers[0] < 0 or numbers[-1] >= self.instances:
      raise OptionError(
        "members",
        f"{[*members]}",
        f"some of the instances 0 to {self.instances - 1}",
        "name those that are to be a group",
      )
    return tuple(numbers)

  def _submesh(self, members: Sequence[int]) -> Mesh:
    axis_index = self.mesh.axis_names.index(self.axis)
    return Mesh(
      np.take(self.mesh.devices, members, axis_index),
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
    """Checks owners; returns them as int [T] of each row."""
    plan = [np.asarray(row) for row in owners]
    sizes = [row.size for row in plan if row.ndim == 1]
    if sizes != lengths.tolist():
      raise self._bad_owners(f"{sizes} for prompts of {lengths.tolist()}")
    for number, row in enumerate(plan):
      if not np.isin(row, self.members).all():
        raise self._bad_owners(f"instances {np.unique(row).tolist()}")
      max_tokens = int(np.bincount(row).max())
      if max_tokens > self.slots:
        raise PromptError(
          "owners",
          f"{max_tokens} tokens of prompt {number} for one instance",
          f"at most its {self.slots} slots",
          "give some to another instance, or make a session of more slots",
        )
    return plan

  def _planned(
    self, plan: list[np.ndarray], order: np.ndarray, mesh: Mesh
  ) -> tuple[KVCache, jax.Array]:
    """Makes an empty cache with a plan's coordinates; also returns slots."""
    size, batch = len(self.members), len(plan)
    place = np.full((batch, order.size), -1, np.int32)
    pos, seg = np.zeros((2, batch, size * self.slots), np.int32)
    used = np.zeros((batch, size), np.int32)
    for row, owners in enumerate(plan):
      # An owner's tokens fill its first slots, in order of position.
      member = np.searchsorted(self.members, owners)
      slot = np.empty(owners.size, np.int64)
      for n in range(size):
        token_indices = np.flatnonzero(member == n)
        slot[token_indices] = n * self.slots + np.arange(token_indices.size)
        used[row, n] = token_indices.size
      pos[row, slot], seg[row, slot] = np.arange(owners.size), 1
      real = (order >= 0) & (order < owners.size)
      place[row, real] = slot[order[real]]
    cache = self.model.init_cache(
      batch,
      size * self.slots,
      sharding=ShardingContext(mesh=mesh, axis=self.axis),
    )
    put = lambda x, like: jax.device_put(x, like.sharding)
    slot_state, everywhere = cache.held, NamedSharding(mesh, P())
    at = Coords(put(pos, slot_state.at.pos), put(seg, slot_state.at.seg))
    count = jax.device_put(used, everywhere)
    slot_state = dataclasses.replace(
      slot_state, at=at, used=count, before=count + 0
    )
    empty_cache = dataclasses.replace(cache, held=slot_state)
    return empty_cache, jax.device_put(place, everywhere)
