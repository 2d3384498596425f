"""Admission of instances to a cluster: greeting, joining, and their loss.

Guarantees: an instance has proved that it has the cluster's key, serves the
same model as the others, and has a name that no other one that is alive has.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ringjax.checks import integer, one_of, positive_int
from ringjax.errors import OptionError, PeerError
from ringjax.parallel.door import Door
from ringjax.parallel.links.array_messages import ArrayMessage
from ringjax.parallel.links.connection import Connection, checked_key, listening
from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.cluster.dispatch.instances import (
  ClusterInstance,
  InstanceTable,
)
from ringjax.serve.cluster.routing import ROLES
from ringjax.serve.cluster.times.phase_times import (
  InstanceTimes,
  QuadraticTimes,
)

_MOST_LINKS = 512


class UnmeasuredInstance(OptionError):
  """An instance joined without measured times, though the router needs them."""


class Admission:
  """Port on which instances join a router, and commands reach it.

  Attributes:
    address: Host and port.
  """

  def __init__(
    self,
    work: threading.Condition,
    instances: InstanceTable,
    *,
    key: bytes,
    host: str,
    port: int,
    vocab: int,
    longest: int,
    stream_tokens: int,
    times: InstanceTimes | None,
    silence_s: float,
    beat_s: float,
    closed: Callable[[], bool],
    on_join: Callable[[], object],
    on_message: Callable[[ClusterInstance, ArrayMessage], object],
    on_lost: Callable[[ClusterInstance, str], object],
    on_command: Callable[[dict[str, Any]], Mapping[str, Any]],
  ):
    """Open the port, and accept instances from now on.

    Args:
      work: Lock of the router.
      instances: Table that instances enter and leave.
      key: Secret key of the cluster.
      host: Interface on which instances join.
      port: Port number; 0 takes a free one.
      vocab: Vocabulary size of the model.
      longest: Maximum total of prompt and generated tokens.
      stream_tokens: Number of prefilled tokens after which pages are published.
      times: Gets the times that each instance has measured; None if instances
        need not measure.
      silence_s: Seconds without a byte after which an instance counts as lost.
      beat_s: Seconds between heartbeats to instances.
      closed: Function that returns whether the router was closed.
      on_join: Function called after each join, with the lock held.
      on_message: Function called with an instance and its message.
      on_lost: Function called with an instance that has left the table and the
        reason, with the lock held.
      on_command: Function that returns the reply to a command.

    Raises:
      OptionError: If the key is too short, or the address is not free.
    """
    self._work, self._instances = work, instances
    self._key, self._vocab, self._longest = checked_key(key), vocab, longest
    self._stream, self._times = stream_tokens, times
    self._silence_s, self._beat_s = silence_s, beat_s
    self._closed, self._on_join = closed, on_join
    self._on_message, self._on_lost = on_message, on_lost
    self._on_command = on_command
    # Model properties that all instances share, as the first one reported.
    self._model: tuple[Any, ...] | None = None
    self._links = 0
    self._server = listening(host, port)
    self.address: tuple[str, int] = (host, self._server.getsockname()[1])
    self._door = Door(
      self._server, self._greet, self._welcome, name="ringjax router"
    )

  def close(self) -> None:
    """Close the port, and disconnect the instances."""
    self._door.close()
    self._server.close()
    with self._work:
      instances = list(self._instances.alive.values())
    for instance in instances:
      instance.link.close("the router was closed")

  def _greet(
    self, link: socket.socket, address: tuple[Any, ...]
  ) -> tuple[Connection, str]:
    """Authenticate an instance or a command client by its key."""
    wire = Connection.admit(
      link, address, self._key, self._silence_s, "instance"
    )
    return wire, address[0]

  def _welcome(self, greeted: tuple[Connection, str]) -> None:
    """Let an instance join, or answer a command."""
    wire, host = greeted
    with self._work:
      full = self._closed() or self._links >= _MOST_LINKS
      self._links += not full
    if full:
      wire.close()
      return
    try:
      fields = wire.hear_object(1 << 20) or {}
      try:
        if fields.get("t") == "command":
          wire.tell_object(self._on_command(fields))
          wire.close()
        else:
          self._join(fields, wire, host)
          return
      except UnmeasuredInstance as error:
        wire.tell_object({"t": "measure", "error": str(error)})
      except OptionError as error:
        wire.tell_object({"t": "refused", "error": str(error)})
      except (KeyError, TypeError, ValueError) as error:
        raise wire.hostile(error) from None
    except PeerError:
      pass  # The peer knows the reason, or is unauthenticated.
    wire.close()
    with self._work:
      self._links -= 1

  def _join(self, fields: dict[str, Any], wire: Connection, host: str) -> None:
    """Register an instance that asks to join."""
    if fields["t"] != "join":
      raise ValueError("neither join nor command")
    address, port = fields["address"]
    if address in ("0.0.0.0", "::"):
      address = host
    if str(address).startswith("127.") and not host.startswith("127."):
      raise OptionError(
        "host",
        f"{address}, for an instance at {host}",
        "an address that the other instances reach",
        "start it with --host=0.0.0.0, or with its address",
      )
    name, times = str(fields["name"])[:256], None
    if self._times is not None:
      if fields.get("times") is None:
        raise UnmeasuredInstance(
          "times",
          f"none of {name}",
          "an instance that has measured its calls",
          "join with a worker of this version, or give the router times",
        )
      times = QuadraticTimes(**fields["times"])
    instance = ClusterInstance(
      name=name,
      role=one_of("role", fields["role"], ROLES),
      link=LiveLink(
        wire,
        on_message=lambda message: self._on_message(instance, message),
        on_end=lambda error: self._disconnected(instance, str(error)),
        beat_s=self._beat_s,
      ),
      address=(str(address), integer("port", port, least=1, most=65535)),
      page=positive_int("page", fields["page"]),
      capacity=positive_int("capacity", fields["capacity"]),
      rows=positive_int("rows", fields["rows"]),
      roles=tuple(
        one_of("roles", role, ROLES) for role in fields.get("roles", ROLES)
      ),
      reads_texts=bool(fields.get("texts", False)),
      moves_pages=bool(fields.get("moves_pages", True)),
    )
    if instance.role not in instance.roles:
      raise OptionError(
        "role", instance.role, f"one of {instance.roles}", "join with one"
      )
    instance.report = {"free_tokens": instance.capacity}
    common = fields["codec"], fields["dtype"], fields["vocab"]
    with self._work:
      if self._still_alive(name):
        raise OptionError(
          "name", name, "one that no other instance has", "pass another name"
        )
      if self._closed():
        raise OptionError("the router was closed")
      if fields["vocab"] != self._vocab or fields["longest"] != self._longest:
        raise OptionError(
          "model",
          f"vocab {fields['vocab']}, longest {fields['longest']}",
          f"{self._vocab} and {self._longest}, as of the router",
          "serve one model with one --longest",
        )
      if self._instances.alive and common != self._model:
        raise OptionError(
          "model",
          f"{fields['dtype']}, {fields['codec']}",
          f"{self._model and self._model[1::-1]}, as of those that joined",
          "serve one model with one --cache and --dtype",
        )
      self._model = common
      if self._times is not None and times is not None:
        self._times.tell(name, times)
      self._instances.alive[name] = instance
      instance.link.tell("welcome", stream=self._stream)
      instance.link.start()
      self._on_join()

  def _still_alive(self, name: str) -> bool:
    """Whether an instance of this name exists and is still heard.

    An instance whose machine has died stays registered until it has been
    silent for too long: a process that restarts under its name waits for that.
    """
    old = self._instances.alive.get(name)
    if old is None:
      return False
    # One message may have been in flight when the instance ended.
    enough = old.heard + 2
    self._work.wait_for(
      lambda: (
        self._closed()
        or self._instances.alive.get(name) is not old
        or old.heard >= enough
      ),
      self._silence_s,
    )
    return name in self._instances.alive

  def _disconnected(self, instance: ClusterInstance, why: str) -> None:
    """Remove an instance from the table."""
    with self._work:
      self._links -= 1
      if instance in self._instances:
        self._instances.remove(instance)
        self._work.notify_all()
        self._on_lost(instance, why)
