"""Engine that answers with given texts, for tests of what is read in them."""

from __future__ import annotations

import threading
import time

import numpy as np

from ringjax.data import Bytes
from ringjax.serve import Handle
from ringjax.serve.request import TokenLogprobs


class ScriptedEngine:
  """Answers each request with a text, token by token, whatever is asked."""

  def __init__(self, *texts, step=1, tokenizer=None):
    """`step`: Number of bytes that come at once."""
    self.tokenizer, self.vocab, self.longest = tokenizer or Bytes(), 262, 4096
    self.rows, self.adapters, self.open, self.missing = 8, (), True, ""
    self.answers, self.step, self.requests = list(texts), step, []
    self.texts = None

  def start(self):
    return self

  def close(self):
    self.open = False

  def figures(self):
    return []

  def advance(self, handle):
    time.sleep(0.001)

  def cancel(self, handle):
    for answer in handle.answers:
      answer.finish = answer.finish or "cancelled"

  def submit(self, request, on_change=None):
    self.requests.append(request)
    handle = Handle(self, request, time.monotonic(), on_change)
    text = self.answers[(len(self.requests) - 1) % len(self.answers)]
    threading.Thread(target=self._answer, args=(handle, text)).start()
    return handle

  def _answer(self, handle, text):
    request = handle.request
    tokens = [*np.frombuffer(text.encode(), np.uint8).tolist(), 257]
    for answer in handle.answers:
      watch = request.stops.watch(self.tokenizer)
      for n, token in enumerate(tokens):
        if answer.finish:
          break
        answer.tokens.append(token)
        answer.text += watch.feed(token)
        if request.logprobs is not None:
          answer.logprobs.append(
            TokenLogprobs(token=token, logprob=-1.0, top=())
          )
        answer.stopped = watch.stopped
        if answer.stopped is not None:
          answer.finish = "stop"
        elif n + 1 == request.max_new_tokens:
          answer.text += watch.flush()
          answer.finish = "length"
        if handle.on_change is not None and (
          answer.finish or not n % self.step
        ):
          handle.on_change(answer)
          time.sleep(0.0002)
