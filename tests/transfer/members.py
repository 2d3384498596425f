"""What other processes do in tests of transfers: `members.py ROLE`.

Tickets and commands come as lines on the standard input; what was done goes as
lines to the standard output.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np

from ringjax import transfer
from ringjax.transfer import protocol, wire

KEY = bytes(range(32))
PAGES, PAGE_BYTES = 6, 1 << 20


def say(*words):
  print(*words, flush=True)


def digest(array):
  return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def contents(seed):
  """The pages of a ticket, uint8 [PAGES, PAGE_BYTES]."""
  draw = np.random.default_rng(seed)
  return draw.integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)


def reader():
  """Pulls each ticket that comes; stops in the middle where it is told to."""
  devices = transfer.DeviceServer()
  say("ready")
  for line in sys.stdin:
    order = json.loads(line)
    ticket = transfer.Ticket.from_json(json.dumps(order["ticket"]))
    address = tuple(order["address"])
    if order.get("middle"):
      stop_in_the_middle(ticket, address, **order["middle"])
    mine = devices if order.get("devices") else None
    got = transfer.pull(ticket, address, KEY, patience_s=60, devices=mine)
    say(json.dumps([got.reads, digest(got.arrays["k"]), got.array_reads]))


def stop_in_the_middle(ticket, address, devices):
  link = wire.PullConnection(socket.create_connection(address), 60, "publisher")
  link.greet_server(KEY)
  asks = protocol.ReadRequest(ticket.incarnation, "x", 0, ticket.pages)
  link.tell(asks, devices=devices)
  link.hear()
  if not devices:
    link.receive(memoryview(bytearray(1000)))
  say("middle")
  time.sleep(600)


def publisher():
  """Publishes pages that are apart, and stands still after two reads."""
  made = []
  told = threading.Event()

  def clock():
    if made and made[0].counters.reads >= 2:
      if not told.is_set():
        told.set()
        say("middle")
      time.sleep(600)
    return time.monotonic()

  made.append(transfer.Publisher(KEY, clock=clock))
  layout = transfer.PageLayout.of("k", "uint8", (PAGE_BYTES,), "byte")
  pages = {2 * n: page for n, page in enumerate(contents(3))}
  ticket = made[0].publish(pages, layout, readers=2)
  say(json.dumps([made[0].address, json.loads(ticket.to_json())]))
  time.sleep(600)


def device_publisher():
  """Publishes pages that lie on a device."""
  devices = transfer.DeviceServer()
  with transfer.Publisher(KEY, devices=devices) as made:
    layout = transfer.PageLayout.of("k", "uint8", (PAGE_BYTES,), "byte")
    batch = transfer.PageBatch((jnp.asarray(contents(3)),))
    pages = {n: batch[n] for n in range(PAGES)}
    ticket = made.publish(pages, layout, readers=9)
    say(json.dumps([made.address, json.loads(ticket.to_json())]))
    time.sleep(600)


if __name__ == "__main__":
  roles = (reader, publisher, device_publisher)
  {role.__name__: role for role in roles}[sys.argv[1]]()
