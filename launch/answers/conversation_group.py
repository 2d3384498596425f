"""A conversation of several processes: process 0 has the terminal.

Guarantees: all processes answer the same messages with the same tokens, and end
an answer at the same token. Process 0 reads files and commands, and sends the
others each message.
Cost: a message to each process for each token of an answer, which says whether
the user has ended it, 0.06 ms over loopback; while the user writes no
collective waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from ringjax.errors import PromptError, TemplateError
from ringjax.parallel.peers import Peers

from .conversation import Conversation, Interrupted

Value = TypeVar("Value")
_ASK, _RESET, _END = "ask", "reset", "end"


class ConversationGroup:
  """Processes that hold one conversation.

  Attributes:
    peers: The processes; a group of one has nothing to send.
  """

  def __init__(self, peers: Peers):
    self.peers = peers

  @property
  def leads(self) -> bool:
    """Whether this process has the terminal."""
    return self.peers.rank == 0

  def shared(self, make: Callable[[], Value]) -> Value:
    """The JSON value that `make` returns in process 0, in all processes.

    Raises:
      PeerError: If process 0 has failed, with an error of `make` for instance.
    """
    if not self.leads:
      return self.peers.receive(0)
    value = make()
    self.peers.post(value)
    return value

  def ask(self, message: str) -> None:
    """Sends the others a message of the user, which all answer now."""
    self.peers.post([_ASK, message])

  def reset(self) -> None:
    """Lets the others forget the conversation, as process 0 does."""
    self.peers.post([_RESET, ""])

  def end(self) -> None:
    """Lets the others' `follow` return."""
    self.peers.post([_END, ""])

  def follow(self, conversation: Conversation) -> None:
    """Answers the messages of process 0 until it ends.

    Args:
      conversation: Conversation of this process, as process 0 has it.

    Raises:
      PeerError: If a process has failed.
    """
    while True:
      kind, message = self.peers.receive(0)
      if kind == _END:
        return
      if kind == _RESET:
        conversation.reset()
        continue
      # Process 0 has the same error, and tells the user.
      with contextlib.suppress(PromptError, TemplateError, Interrupted):
        conversation.ask(
          message,
          lambda text: None,
          stopped=lambda: self.peers.receive(0, idle=False),
        )

  def stopped(self, stop: bool) -> bool:
    """In process 0: sends the others whether the answer ends here."""
    self.peers.post(stop)
    return stop
