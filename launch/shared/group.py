"""The processes of a script: when one is lost, the others end and report it.

A process that waits in a collective for one that has died cannot be woken, and
JAX itself notices after minutes, or aborts with a stack trace. So each process
ends itself once it receives the failure, with the rank and the reason in one
line. Before anything is loaded the processes compare their flags.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from absl import flags

import ringjax
from ringjax.errors import PeerError
from ringjax.parallel.joint_outcome import check_equal
from ringjax.parallel.peers import Peers

from . import console
from .flag_helpers import is_place, is_shown

# Exit status after another process was lost.
FAILED = 3
# A healthy process may be silent for this long: it copies gigabytes, or is
# starved.
PATIENCE_S = 60.0
_MOMENT_S = 2.0
# Characters of a flag's value that is sent as it is.
_LONGEST_FACT = 120
# Paths and addresses in texts, as those of NAME=/folder,NAME=gs://bucket/folder.
_PLACES = re.compile(r"(?<![^=:,])(?:~|\.{1,2}|[a-z0-9]+:/)?/[^,:]+")
_PLACE = "a path"
# Flags that say which process this is, and how it finds the others.
_OWN = frozenset(
  {
    "coordinator",
    "devices",
    "distributed",
    "init_timeout",
    "num_processes",
    "process_id",
  }
)


class Group:
  """Membership of this process in the group of all processes.

  Args:
    screen: Console of this process.
    doing: Function that returns its current activity, for its last message.
    leaving: Called before this process ends because of a failure.
    lingers: Returns the seconds after which it ends once another is lost: it
      still sends errors to its clients, for instance, and calls `end`.
  """

  def __init__(
    self,
    screen: console.Screen,
    doing: Callable[[], str],
    *,
    leaving: Callable[[], object] = lambda: None,
    lingers: Callable[[], float] = lambda: 0.0,
  ):
    self._screen, self._doing, self._leaving = screen, doing, leaving
    self._lingers = lingers
    self._peers: Peers | None = None
    self._ending = threading.Lock()

  @property
  def several(self) -> bool:
    """Whether there are other processes."""
    return self._peers is not None and self._peers.size > 1

  def meet(
    self,
    values: flags.FlagValues,
    timeout_s: float = PATIENCE_S,
    *,
    own: Collection[str] = (),
    command: str = "",
  ) -> Peers:
    """Connects the processes, and ends this one when another is lost.

    Args:
      values: Flags as passed, which are compared, see `flag_facts`.
      timeout_s: Seconds that another process may be silent.
      own: Names of further flags that may differ: what they choose happens in
        each process alone, or in process 0.
      command: Sub-command of the script, which is compared, too.

    Raises:
      OptionError: If a flag differs from that of another process.
      PeerError: If a process is missing.
    """
    peers = self._peers = Peers.of_processes(timeout_s=timeout_s)

    def failed(error: PeerError) -> None:
      # Before JAX notices and aborts with a stack trace.
      with self._ending:
        self._screen.error(f"{error}, while {self._doing()}")
        if (linger_s := self._lingers()) > 0:
          self.end_after(linger_s)
          return
        self.end()

    if self.several:
      # First: a process that is refused ends the others, which are too.
      check_equal(peers.gather(flag_facts(values, own, command)))
      peers.on_failure(failed)
      peers.check()
    return peers

  def end_after(self, seconds: float) -> None:
    """Ends this process after some seconds, unless it ends before."""
    timer = threading.Timer(seconds, self.end)
    timer.daemon = True
    timer.start()

  def end(self) -> None:
    """Ends this process after another one was lost; does not return."""
    self._leaving()
    _leave(FAILED)

  def leave(self, error: BaseException, status: int) -> None:
    """Ends this process so that no other one waits for it.

    Returns only if there is no other process.
    """
    self._leaving()
    if self._peers is None or not self.several:
      # JAX may already have connected processes that did not `meet` yet.
      if jax.distributed.is_initialized():
        _leave(status)
      return
    if isinstance(error, PeerError):
      self._peers.close()
    else:
      self._peers.abandon(error)
    _leave(status)

  def failed(self, error: Exception, doing: str, knobs: str) -> int:
    """Reports an error; several processes then end, one returns the status.

    For the arguments see `console.reason`.
    """
    text = console.reason(error, doing, knobs)
    if text is None and self.several:
      # A collective may fail before the lost process is identified.
      time.sleep(_MOMENT_S)
    with self._ending:
      return self._failed(error, text)

  def _failed(self, error: Exception, text: str | None) -> int:
    if text is None:
      self._screen.end()
      if not jax.distributed.is_initialized():
        raise error
      traceback.print_exception(error, file=sys.stderr)
      text = f"{type(error).__name__}: {error}"
    self._screen.error(text)
    status = FAILED if isinstance(error, PeerError) else 2
    self.leave(error, status)
    return status

  def close(self) -> None:
    """Leaves the group; the other processes may continue."""
    if self._peers is not None:
      self._peers.close()


def flag_facts(
  values: flags.FlagValues, own: Collection[str] = (), command: str = ""
) -> dict[str, str]:
  """Texts that are equal in processes which were started by one command.

  A file, a folder or an address may be another one in each process; all of them
  have one, or none. In flags with other values, too, and in a config, where its
  path begins with a slash, ~ or a dot.

  Args:
    values: Flags as passed.
    own: Names of flags that may differ, besides those that tell the processes
      apart.
    command: Sub-command of the script.
  """
  facts = {
    "version of ringjax": ringjax.__version__,
    "version of jax": jax.__version__,
  }
  if command:
    facts["command"] = command
  for name in values:
    flag = values[name]
    if name in _OWN or name in own or not is_shown(flag):
      continue
    value: Any = flag.value
    if value is not None and is_place(flag):
      value = _PLACE
    if isinstance(value, list):
      value = ",".join(map(str, value))
    facts[f"--{name}"] = "" if value is None else _text(value)
  config = values["config"].value if "config" in values else None
  if hasattr(config, "to_json_best_effort"):
    # Functions have no text that is the same everywhere.
    facts |= _leaves("--config", json.loads(config.to_json_best_effort()))
  return facts


def _text(value: object) -> str:
  """Text of a value without paths, of a long one its digest.

  The other processes are sent it, and show it.
  """
  text = _PLACES.sub(_PLACE, str(value))
  if len(text) <= _LONGEST_FACT:
    return text
  digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
  return f"{len(text)} characters of digest {digest[:16]}"


def _leaves(name: str, value: object) -> dict[str, str]:
  """Texts of a JSON value's parts by their path."""
  parts: dict[str, str] = {}
  if isinstance(value, Mapping):
    for key, part in value.items():
      parts |= _leaves(f"{name}.{key}", part)
  elif isinstance(value, list):
    for n, part in enumerate(value):
      parts |= _leaves(f"{name}[{n}]", part)
  else:
    parts[name] = _text(value)
  return parts


def _leave(status: int) -> None:
  if jax.process_index() == 0:
    # JAX's coordinator runs here: the others abort if it ends before them.
    time.sleep(1.0)
  console.leave(status)
