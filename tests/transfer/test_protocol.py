"""The protocol of pulling pages: all interleavings, and planted bugs."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import types

import pytest

import ringjax
from ringjax.transfer.interleavings import PullScenario
from ringjax.transfer.interleavings import explore as checked

FOLDER = pathlib.Path(ringjax.__file__).parent / "transfer"


@dataclasses.dataclass(frozen=True)
class ProtocolBug:
  """Some texts of the protocol become others; a check must fail then."""

  name: str
  changes: tuple[tuple[str, str], ...]
  seen_by: str


def load(name, changes=()):
  """A module of the folder as it is written, with some texts changed.

  It is not imported: what checks types at each call would take most of the
  time of an exploration.
  """
  text = (FOLDER / f"{name}.py").read_text()
  for old, new in changes:
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    text = text.replace(old, new)
  module = types.ModuleType(f"unchecked_{name}")
  sys.modules[module.__name__] = module
  exec(compile(text, name, "exec"), vars(module))
  return module


EXPLORE = load("interleavings")


def explore(scenarios, changes=()):
  return EXPLORE.explore_several(
    scenarios, protocol=load("protocol", changes), most_states=400_000
  )


# Publisher A: two readers of one ticket, and a second ticket that shares a
# page. Publisher B: one of these readers, in two reads. Three requests.
A = PullScenario(
  pages=(0, 1), readers=2, pulls=(((0, 1),), ((0, 1),)), second=(1,)
)
B = PullScenario(pages=(0, 1), readers=1, pulls=(((0,), (1,)),), second=(1,))
SMALL = PullScenario(pages=(0,), readers=1, pulls=(((0,),),))

# Pages return although they are being read.
_AT_ONCE = "else _close(_unread(state), {})"
_UNREAD = """def _unread(state):
  state.reads.clear()
  for page, held in state.holds.items():
    state.holds[page] = held._replace(reads=0)
  return state


def _close("""

BUGS = [
  ProtocolBug(
    "COMPLETE overtakes a read",
    (
      (
        "  if len(state.came) < len(state.reads):\n    return _ask(state)\n",
        "  if state.requested < len(state.reads):\n    return _ask(state)\n",
      ),
    ),
    "behind",
  ),
  ProtocolBug(
    "lease shorter than a read",
    (
      ("else _close(state, expired)", _AT_ONCE.format("expired")),
      ("def _close(", _UNREAD),
    ),
    "accepts",
  ),
  ProtocolBug(
    "abort frees at once",
    (
      ("else _close(state, withdrawn)", _AT_ONCE.format("withdrawn")),
      ("def _close(", _UNREAD),
    ),
    "accepts",
  ),
  ProtocolBug(
    "lost acknowledgement leaks",
    (("if expired is None", "if expired is None or expired.ended"),),
    "back",
  ),
  ProtocolBug(
    "two readers and one acknowledgement",
    (("if len(ended) >= ticket.readers:", "if ended:"),),
    "early",
  ),
  ProtocolBug(
    "stale generation accepted",
    (
      ("elif generation != requested:", "elif False:"),
      (
        "  if (reply.incarnation, reply.pages) != (\n"
        "    state.incarnation,\n"
        "    state.reads[reply.number],\n"
        "  ):\n",
        "  if reply.incarnation != state.incarnation:\n",
      ),
    ),
    "accepts",
  ),
  ProtocolBug(
    "double free",
    (
      (
        "      state.holds[page] = remaining\n",
        "      state.holds[page] = remaining\n      free.append(page)\n",
      ),
    ),
    "once",
  ),
  ProtocolBug(
    "restart with old ids",
    (("  return PublisherState(incarnation)", "  return PublisherState(0)"),),
    "accepts",
  ),
  ProtocolBug(
    "an acknowledgement counts twice",
    (
      ("ended: frozenset[str] = frozenset()", "ended: tuple[str, ...] = ()"),
      ("ended = ticket.ended | {reader}", "ended = (*ticket.ended, reader)"),
    ),
    "early",
  ),
  ProtocolBug(
    "a read of a free page begins",
    (
      (
        "generation = _open_generation(state, page)\n"
        "    if generation is None:",
        "hold = state.holds.get(page, PageHold(-1, 0, 0))\n"
        "    generation = hold.generation\n    if False:",
      ),
      ("elif generation != requested:", "elif False:"),
      (
        "    hold = state.holds[page]\n    state.holds[page] = hold._replace",
        "    hold = state.holds.get(page, PageHold(-1, 0, 0))\n"
        "    state.holds[page] = hold._replace",
      ),
    ),
    "once",
  ),
  ProtocolBug(
    "COMPLETE does not close",
    (
      (
        "    return _close(state, ticket)\n  state.tickets",
        "    pass\n  state.tickets",
      ),
    ),
    "back",
  ),
]


def test_no_interleaving_breaks_the_protocol():
  found = [explore([scenario]) for scenario in (A, B)]
  for report in found:
    assert not report.fault, "\n".join((report.fault, *report.trace))
    # It is not for lack of events that nothing went wrong.
    assert report.accepted > 100
  assert [report.states for report in found] == [6447, 2424]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug):
  found = next(
    (r for x in (B, A) if (r := explore([x], bug.changes)).fault), None
  )
  assert found is not None, "no interleaving shows it"
  assert found.fault.split(":")[0] == bug.seen_by, found
  assert len(found.trace) < 12


@pytest.mark.parametrize("side", range(2))
def test_one_check_of_generations_is_enough(side):
  # The publisher refuses, and the reader compares: either alone is safe.
  (bug,) = [x for x in BUGS if x.name == "stale generation accepted"]
  assert not explore([B], bug.changes[side : side + 1]).fault


def test_publishers_do_not_meet():
  # All combinations of states are reached, and no others, so that it is
  # enough to look at each publisher alone.
  alone = explore([SMALL]).states
  assert explore([SMALL, SMALL]).states == alone**2


@pytest.mark.slow
def test_a_larger_system():
  larger = PullScenario(
    (0, 1), 2, (((0,), (1,)), ((0, 1),)), second=(1, 2), window=1
  )
  assert not explore([larger]).fault


def test_the_module_is_the_one_that_is_explored():
  report = checked(SMALL)
  assert (report.fault, report.states) == ("", explore([SMALL]).states)
