"""State of a router's task at an instance of a cluster."""

from __future__ import annotations

import collections
import dataclasses
import threading

from ringjax.parallel.links.live_link import LiveLink
from ringjax.serve.prefix.prefix_transfer import (
  LayerCopies,
  LayerParts,
  PrefixHashes,
)
from ringjax.serve.request import Handle, Request
from ringjax.transfer import Ticket
from ringjax.transfer.client import Address


@dataclasses.dataclass(eq=False)
class WorkerTask:
  """A task of the router: a prompt to prefill, or a request to decode.

  Attributes:
    number: Task number.
    request: Request as the engine gets it.
    tokens: Maximum number of pool tokens that it takes.
    reads: Whether the task is prefill only.
    offers: Whether the task only publishes pages that are cached already.
    link: Connection to the router that sent the task.
    tickets: Tickets of pages to pull before decode, in the prompt's order.
    more_tickets: Whether further tickets of a prompt in prefill will come.
    pulled: Number of pulled pages, of their publisher's size, and their bytes.
    pulling: Whether a thread is pulling.
    address: Address of the pages' publisher.
    handle: Handle of the request once the engine has it.
    admitted: Whether it may take its room.
    stream: Number of prefilled tokens after which pages are published; 0
      publishes all at the end.
    offers_made: Tickets of the pages that this task has published.
    pages: Number of these pages.
    copying: Whether a part is about to be published.
    begun: Number of pages after these whose layers are sent in the step that
      computes them; 0 for none.
    unpublished: Copies of such layers that are not yet published.
    layered: (pages, layer): number of such pages, and the layer up to which
      they are published.
    waits: Whether a thread is about to publish `unpublished`.
    parts: Received pages of some layers.
    publishes: Lock held while pages are published, to keep their order.
    published: Whether all pages were copied, or could not be.
    dropped: Whether the router has cancelled the task.
    hashes: Hashes of the prompt's pages, which its parts share.
    sent: Tokens and characters of each answer that the router has.
  """

  number: int
  request: Request
  tokens: int
  reads: bool
  link: LiveLink
  offers: bool = False
  tickets: collections.deque[Ticket] = dataclasses.field(
    default_factory=collections.deque
  )
  more_tickets: bool = False
  pulled: tuple[int, int] = (0, 0)
  pulling: bool = False
  address: Address = ("", 0)
  handle: Handle | None = None
  admitted: bool = False
  stream: int = 0
  offers_made: list[Ticket] = dataclasses.field(default_factory=list)
  pages: int = 0
  copying: bool = False
  begun: int = 0
  unpublished: collections.deque[LayerCopies] = dataclasses.field(
    default_factory=collections.deque
  )
  layered: tuple[int, int] = (0, 0)
  waits: bool = False
  parts: LayerParts | None = None
  publishes: threading.Lock = dataclasses.field(default_factory=threading.Lock)
  published: bool = False
  dropped: bool = False
  hashes: PrefixHashes = dataclasses.field(default_factory=PrefixHashes)
  sent: list[tuple[int, int]] = dataclasses.field(default_factory=list)

  @property
  def holds(self) -> bool:
    """Whether it needs the pool: published pages do not."""
    return not self.published and not self.offers
