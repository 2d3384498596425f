"""Pages of a cache that move between processes: published, and pulled."""

from ringjax.parallel.links.connection import (
  AuthenticationError,
  HostileMessageError,
)
from ringjax.transfer.client import (
  PulledPages,
  StaleTicketError,
  decline,
  pull,
  pull_shards,
)
from ringjax.transfer.description import PageLayout, PageLeaf, Ticket
from ringjax.transfer.device_pages import DevicePage, PageBatch
from ringjax.transfer.device_server import ArrayOffer, DeviceServer
from ringjax.transfer.interleavings import (
  ProtocolReport,
  PullScenario,
  explore,
  explore_several,
)
from ringjax.transfer.server import Publisher, PublisherCounters

__all__ = [
  "ArrayOffer",
  "AuthenticationError",
  "DevicePage",
  "DeviceServer",
  "HostileMessageError",
  "PageBatch",
  "PageLayout",
  "PageLeaf",
  "ProtocolReport",
  "Publisher",
  "PublisherCounters",
  "PullScenario",
  "PulledPages",
  "StaleTicketError",
  "Ticket",
  "decline",
  "explore",
  "explore_several",
  "pull",
  "pull_shards",
]
