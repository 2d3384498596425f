"""Elastic instances as processes: groups that change while they are served.

`ElasticWorkers` starts processes that have the model and slots each, or
instances in threads, and carries the calls of an `ElasticManager` to them:
rings of processes prefill prompts, fewer processes decode, others join, and
some may leave or die meanwhile.

Guarantees: tokens are those of `rj.infer.generate` with greedy decoding. When a
process dies at any moment, or is stalled for longer than `patience_s`, the
requests whose keys it had are prefilled again by others or end with an error
that says so; wrong text is never returned. Links are authenticated, not
encrypted, see `parallel.links.connection`.
Cost: bytes between instances by kind, `ElasticAnswers.bytes_sent`; this process
computes nothing, and a call takes a message to each member and one back.
Memory: in each process the model and `slots` tokens of all layers.
Ref: Wu et al. 2024, LoongServe (SOSP), arXiv 2404.09526.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ringjax.checks import number, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.infer import inputs
from ringjax.infer.child_processes import (
  end_children,
  first_line,
  start_child,
)
from ringjax.infer.loongserve.elastic_instance import instance_programs
from ringjax.infer.loongserve.elastic_worker import (
  PATIENCE_S,
  TO_MANAGER,
  ElasticWorker,
)
from ringjax.models.transformer import Transformer
from ringjax.parallel.gpu_processes import gpu_variables, visible_gpus
from ringjax.parallel.links.array_messages import send_arrays
from ringjax.parallel.links.connection import Connection
from ringjax.parallel.links.link_group import LinkGroup
from ringjax.parallel.links.live_link import LinkEnding, LiveLink
from ringjax.serve.cluster.loongserve.elastic_manager import (
  Abandon,
  DropKeys,
  ElasticManager,
  LiveAction,
  LiveAnswer,
  LiveCall,
  LiveCounts,
  Release,
)
from ringjax.serve.cluster.loongserve.elastic_scheduler import (
  ElasticOptions,
  ElasticPolicy,
  ElasticScheduler,
)
from ringjax.serve.cluster.times.phase_times import QuadraticTimes

# Seconds that a process may take to load the model.
_START_S = 600.0
# Assumed times for the choice of groups without measurements: prefill takes
# time in proportion to the prompt's length, half as much with twice as many.
_TOKEN_S, _STEP_S = 4e-3, 0.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticAnswers:
  """Answers of elastic instances, with counters, events and bytes sent.

  Attributes:
    answers: Answers, in the order of the prompts.
    counts: Counts of decisions and of tokens kept, moved and lost.
    events: Decisions in their order, values for JSON with their time `at_s`.
    bytes_sent: Bytes between instances, headers included, by "ring", "query",
      "partial" and "moved".
    seconds: Seconds from the first prompt to the last answer.
  """

  answers: tuple[LiveAnswer, ...]
  counts: LiveCounts
  events: tuple[dict[str, Any], ...]
  bytes_sent: dict[str, int]
  seconds: float


@dataclasses.dataclass(kw_only=True)
class _Member:
  """Connection to an instance, on the manager's side."""

  number: int
  address: tuple[str, int]
  link: LiveLink
  process: subprocess.Popen[str] | None = None
  server: ElasticWorker | None = None
  vocab: int = 0


class ElasticWorkers:
  """Processes, each an elastic instance, and the manager's links to them.

  Attributes:
    slots: Tokens that each instance has room for.
    patience_s: Seconds for which an instance may be silent.
  """

  def __init__(self, *, slots: int, patience_s: int | float):
    """Prepare without an instance; see `start` and `in_threads`."""
    self.slots = positive_int("slots", slots)
    self.patience_s = number("patience_s", patience_s, above=0)
    self._key = secrets.token_bytes(32)
    self._members: dict[int, _Member] = {}
    self._group: LinkGroup[int] = LinkGroup(self._note_lost, together=False)
    self._events: queue.Queue[tuple[str, int, Any]] = queue.Queue()
    self._next, self._calls = 0, 0
    self._connect_new: Callable[[int], _Member] | None = None
    self._busy = threading.Lock()

  @classmethod
  def start(
    cls,
    model: str | os.PathLike[str],
    count: int,
    *,
    slots: int,
    dtype: str | None = None,
    strict: bool = True,
    patience_s: int | float = PATIENCE_S,
  ) -> ElasticWorkers:
    """Start processes of this machine, which end with this one.

    Args:
      model: A folder or a GGUF file.
      count: Number of processes.
      slots: Tokens that each process has room for.
      dtype: Dtype of the weights; default: the folder's.
      strict: Whether unknown config keys are refused, see `rj.models.load`.
      patience_s: Seconds for which a process may be silent while it is asked.

    Raises:
      PeerError: If a process does not start.
    """
    positive_int("count", count)
    self = cls(slots=slots, patience_s=patience_s)
    settings = {
      "key": self._key.hex(),
      "model": os.fspath(model),
      "dtype": dtype,
      "strict": strict,
      "slots": slots,
      "patience_s": patience_s,
    }
    self._connect_new = lambda n: self._connected(
      n, process=_start_process(n, settings, count)
    )
    with self._closing():
      # All processes load at the same time.
      processes = [
        (n, _start_process(n, settings, count)) for n in range(count)
      ]
      for n, process in processes:
        self._members[n] = self._connected(n, process=process)
    self._next = count
    return self

  @classmethod
  def in_threads(
    cls,
    model: Transformer,
    count: int,
    *,
    slots: int,
    patience_s: int | float = PATIENCE_S,
  ) -> ElasticWorkers:
    """Start instances in threads of this process, for experiments."""
    positive_int("count", count)
    self = cls(slots=slots, patience_s=patience_s)
    programs = instance_programs(model)

    def connect_new(n: int) -> _Member:
      server = ElasticWorker(
        model, n, slots, self._key, programs=programs, patience_s=patience_s
      )
      threading.Thread(target=server.serve, daemon=True).start()
      return self._connected(n, server=server)

    self._connect_new = connect_new
    with self._closing():
      for n in range(count):
        self._members[n] = connect_new(n)
    self._next = count
    return self

  @contextlib.contextmanager
  def _closing(self) -> Iterator[None]:
    try:
      yield
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> ElasticWorkers:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def live(self) -> tuple[int, ...]:
    """Numbers of the instances that are alive."""
    return tuple(self._members)

  @property
  def vocab(self) -> int:
    """Size of the vocabulary of the instances' model.

    Raises:
      PeerError: If no instance is left.
    """
    if not self._members:
      raise PeerError("no instance is left")
    return next(iter(self._members.values())).vocab

  @property
  def processes(self) -> dict[int, subprocess.Popen[str]]:
    """Processes of the instances that are alive, by number."""
    return {
      n: member.process for n, member in self._members.items() if member.process
    }

  def join(self) -> int:
    """Start another instance, which takes part from now on; return its number.

    Raises:
      PeerError: If it does not start.
    """
    assert self._connect_new is not None
    instance, self._next = self._next, self._next + 1
    self._events.put(("join", instance, self._connect_new(instance)))
    return instance

  def leave(self, instance: int) -> None:
    """Let an instance move its keys to others and end; while serving."""
    self._events.put(("leave", instance, None))

  def close(self) -> None:
    """End all instances."""
    for member in [*self._members.values()]:
      self._end(member)
    self._members.clear()

  # -------------------------------------------------------------------------
  # Serving
  # -------------------------------------------------------------------------

  def serve(
    self,
    prompts: Sequence[Any],
    max_new_tokens: int | Sequence[int],
    *,
    policy: ElasticPolicy | None = None,
    arrivals: Sequence[float] | None = None,
    stop_ids: Sequence[int] = (),
    reserve: int | None = None,
    proactive: bool = True,
    watch: Callable[[dict[str, Any]], object] | None = None,
  ) -> ElasticAnswers:
    """Generate answers to prompts by greedy decoding.

    Args:
      prompts: Token ids of each prompt.
      max_new_tokens: Maximum tokens of each answer, one number or one for each.
      policy: Decides which instances prefill and decode what; default: an
        `ElasticScheduler` that assumes a linear speed-up of prefill.
      arrivals: Arrival time of each prompt, in seconds from now; default: 0.
      stop_ids: Token ids that end an answer.
      reserve: Number of an answer's tokens that get slots at its beginning, and
        again when these are full: instances join as keys grow. Default: all.
      proactive: Whether prefill leaves keys where decode needs them; else they
        are moved after prefill.
      watch: Function that gets each event at once; it may call `leave` and
        `join`.

    Raises:
      PromptError: If a prompt is empty, or has ids that the model does not
        have.
      PeerError: If no instance is left.
      OptionError: If another call is being served, the policy has other slots,
        or the number of arguments does not match the prompts.
    """
    vocab = self.vocab
    ids = [inputs.prompt(prompt, vocab) for prompt in prompts]
    counts = _per_prompt("max_new_tokens", max_new_tokens, len(ids))
    times = [0.0] * len(ids) if arrivals is None else [*arrivals]
    if len(times) != len(ids):
      raise OptionError(
        "arrivals", len(times), f"{len(ids)}", "pass one for each prompt"
      )
    policy = self.policy() if policy is None else policy
    if policy.options.slots != self.slots:
      raise OptionError(
        "policy",
        f"{policy.options.slots:,} slots",
        f"the {self.slots:,} that instances have",
        f"pass ElasticOptions(slots={self.slots})",
      )
    events: list[dict[str, Any]] = []
    begin_s = time.monotonic()

    def note(event: dict[str, Any]) -> None:
      events.append({"at_s": round(time.monotonic() - begin_s, 3), **event})
      if watch is not None:
        watch(events[-1])

    manager = ElasticManager(
      policy,
      self._members,
      stop_ids=stop_ids,
      reserve=reserve,
      proactive=proactive,
      first_call=self._calls,
      note=note,
    )
    if not self._busy.acquire(blocking=False):
      raise OptionError(
        "workers", "some that serve another call, or failed in one",
        "workers that are free", "wait for it, or start others",
      )  # fmt: skip
    sent: collections.Counter[str] = collections.Counter()
    pending = sorted(range(len(ids)), key=lambda n: (times[n], n))
    while pending or not manager.idle:
      now_s = time.monotonic() - begin_s
      while pending and times[pending[0]] <= now_s:
        n = pending.pop(0)
        manager.submit(n, ids[n].size, counts[n], times[n])
      for action in manager.decide(now_s):
        self._do(action, manager, ids)
      if manager.idle and not pending:
        break
      self._hear(manager, sent, times[pending[0]] - now_s if pending else None)
    self._busy.release()
    return ElasticAnswers(
      answers=tuple(manager.answers[n] for n in range(len(ids))),
      counts=manager.counts,
      events=tuple(events),
      bytes_sent=dict(sent),
      seconds=time.monotonic() - begin_s,
    )

  def policy(self, **options: Any) -> ElasticScheduler:
    """Make a scheduler for these instances, with `ElasticOptions`."""
    times = [
      QuadraticTimes(prefill_token_s=_TOKEN_S / n, decode_fixed_s=_STEP_S)
      for n in range(1, max(2, self._next + 1))
    ]
    return ElasticScheduler(times, ElasticOptions(slots=self.slots, **options))

  def _do(
    self, action: LiveAction, manager: ElasticManager, ids: list[np.ndarray]
  ) -> None:
    """Send an action to the instances concerned."""
    if isinstance(action, LiveCall):
      self._calls = max(self._calls, action.number + 1)
      texts = {
        row.request: np.concatenate(
          [ids[row.request], manager.answers[row.request].tokens]
        ).astype(np.int32)
        for row in action.rows
      }
      fields, arrays = _message(action, texts)
      fields["addresses"] = {
        str(n): [*self._members[n].address]
        for n in action.members
        if n in self._members
      }
      for n in action.members:
        self._tell(n, action.kind, arrays, **fields)
    elif isinstance(action, Abandon):
      for n in action.members:
        self._tell(n, "abandon", call=action.call)
    elif isinstance(action, DropKeys):
      arrays = [
        np.array([number], np.int32)
        for number in (action.request, action.first)
      ]
      self._tell(action.instance, "drop", arrays)
    elif isinstance(action, Release) and action.instance in self._members:
      self._end(self._members.pop(action.instance))

  def _tell(
    self,
    instance: int,
    kind: str,
    arrays: Sequence[np.ndarray] = (),
    **fields: Any,
  ) -> None:
    if (member := self._members.get(instance)) is not None:
      # Otherwise it was lost: the manager knows, or will get the event next.
      member.link.tell(kind, arrays, **fields)

  def _hear(
    self,
    manager: ElasticManager,
    sent: collections.Counter[str],
    wait_s: float | None,
  ) -> None:
    """Wait for events."""
    wait_s = 1.0 if wait_s is None else min(1.0, max(0.0, wait_s))
    with contextlib.suppress(queue.Empty):
      news = [self._events.get(timeout=wait_s)]
      while not self._events.empty():
        news.append(self._events.get())
      for kind, instance, payload in news:
        self._handle(kind, instance, payload, manager, sent)

  def _handle(
    self,
    kind: str,
    instance: int,
    payload: Any,
    manager: ElasticManager,
    sent: collections.Counter[str],
  ) -> None:
    if kind == "join":
      self._members[instance] = payload
      manager.join(instance)
    elif kind == "leave":
      manager.leave(instance)
    elif kind == "gone":
      self._drop_lost(instance, manager, payload)
    elif kind in ("done", "failed") and instance in self._members:
      fields = payload.fields
      sent.update(fields.get("bytes_sent", {}))
      manager.answered(
        fields["call"],
        instance,
        [(n, tokens) for n, tokens in fields.get("tokens", ())],
        fields.get("why", ""),
      )

  def _drop_lost(
    self, instance: int, manager: ElasticManager, why: str
  ) -> None:
    member = self._members.pop(instance, None)
    if member is not None:
      # A stalled process must not continue later.
      self._end(member)
      manager.lost(instance, why)

  # -------------------------------------------------------------------------
  # Processes
  # -------------------------------------------------------------------------

  def _connected(
    self,
    instance: int,
    *,
    process: subprocess.Popen[str] | None = None,
    server: ElasticWorker | None = None,
  ) -> _Member:
    """Connect to a listening instance.

    Raises:
      PeerError: If it does not listen.
    """
    if server is not None:
      address, vocab = server.address, server.vocab
    else:
      assert process is not None
      try:
        reply = first_line("instance", instance, process, _START_S)
      except PeerError:
        end_children([process])
        raise
      host, port, vocab = reply
      address = host, port
    name = f"instance {instance}"
    wire = Connection.connect(
      address, self._key, self.patience_s, name, rank=instance
    )
    send_arrays(wire, "manage", number=instance)
    link = LiveLink(
      wire,
      rank=instance,
      kinds=TO_MANAGER,
      on_message=lambda message: self._events.put(
        (message.kind, instance, message)
      ),
    )
    self._group.add(instance, link)
    member = _Member(
      number=instance,
      address=address,
      link=link,
      process=process,
      server=server,
      vocab=vocab,
    )
    link.start()
    return member

  def _note_lost(self, instance: int, link: LiveLink) -> None:
    """Queue the event of an instance whose link has ended."""
    why = {
      LinkEnding.SILENT: f"silent for {self.patience_s:g} s",
      LinkEnding.CLOSED: "it closed its connection",
    }
    assert link.ending is not None
    self._events.put(("gone", instance, why.get(link.ending, str(link.error))))

  def _end(self, member: _Member) -> None:
    self._group.remove(member.number, "it is needed no more")
    if member.server is not None:
      member.server.close()
    if member.process is not None:
      end_children([member.process])
    member.link.join(1.0)


def _message(
  call: LiveCall, texts: dict[int, np.ndarray]
) -> tuple[dict[str, Any], list[np.ndarray]]:
  """Fields and arrays of a call's message, in `elastic_worker`'s format."""
  int32 = lambda x: np.asarray(x, np.int32)
  fields: dict[str, Any] = {"call": call.number, "group": [*call.members]}
  if call.kind == "move":
    fields["source"] = call.members[0]
    return fields, [int32(column) for column in zip(*call.parts, strict=True)]
  requests = int32([row.request for row in call.rows])
  lengths = int32([row.tokens for row in call.rows])
  if call.kind == "read":
    tokens = np.concatenate([texts[row.request] for row in call.rows])
    if call.striped:
      owners = int32(call.members)[np.arange(tokens.size) % len(call.members)]
    else:
      pairs = [pair for row in call.rows for pair in row.tokens_by_instance]
      owners = np.repeat(*map(int32, zip(*pairs, strict=True)))
    return fields, [requests, lengths, tokens, int32(owners)]
  fields["steps"] = call.steps
  holds = [
    [int(dict(row.tokens_by_instance).get(n, 0) > 0) for n in call.members]
    for row in call.rows
  ]
  return fields, [
    requests,
    int32([row.master for row in call.rows]),
    int32([texts[row.request][-1] for row in call.rows]),
    lengths - 1,
    int32(holds),
  ]


def _per_prompt(name: str, value: int | Sequence[int], count: int) -> list[int]:
  if isinstance(value, Sequence):
    if len(value) != count:
      raise OptionError(
        name, f"{len(value)} numbers", f"{count}", "pass one for each prompt"
      )
    return [positive_int(name, number) for number in value]
  return [positive_int(name, value)] * count


def _start_process(
  instance: int, settings: dict[str, Any], count: int
) -> subprocess.Popen[str]:
  """Start a process that loads the model, one of at least `count`."""
  gpus = visible_gpus(os.environ)
  return start_child(
    "ringjax.infer.loongserve.elastic_worker",
    {**settings, "number": instance},
    gpu_variables(instance, max(count, instance + 1), gpus),
  )
