"""Training of an encoder and its cross-attention with a frozen decoder.

Guarantees: no weight of the decoder gets a gradient or changes. The masked
tokens of a row depend on its tokens and the seed alone, so a run that resumes
masks the same.
Memory: gradients and moments of the encoder and of cross-attention.
Ref: Yen et al. 2024, arXiv 2402.16617 (CEPE and, by distillation, CEPED).
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ringjax.checks import number, positive_int
from ringjax.data.batches.packing import PackedBatch
from ringjax.models.cepe import CepeTransformer
from ringjax.train.batch import BY_TOKEN, Batch, Chunks


class EncoderTraining:
  """Trains the encoder and cross-attention of a `CepeTransformer` alone.

  It is used in place of `Lora`.
  """

  def start(self, model: CepeTransformer, *, seed: int = 0) -> dict[str, Any]:
    """The initial parameters, copies of the model's."""
    del seed
    cross = [[block.cross for block in run] for run in model.stack.blocks]
    return jax.tree.map(jnp.copy, {"cross": cross, "encoder": model.encoder})

  def model(self, params: PyTree, frozen: PyTree) -> CepeTransformer:
    """The model with these parameters; its decoder gets no gradient."""
    model = jax.tree.map(jax.lax.stop_gradient, frozen)
    model.encoder = params["encoder"]
    for run, cross_blocks in zip(
      model.stack.blocks, params["cross"], strict=True
    ):
      for block, cross in zip(run, cross_blocks, strict=True):
        block.cross = cross
    return model

  def merged(self, params: PyTree, frozen: PyTree) -> CepeTransformer:
    """The model with these parameters, to be saved."""
    merged = jax.jit(self.model)(params, frozen)
    # A cached program returns the folder of the model it was traced with.
    merged.origin = frozen.origin
    return merged


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextSplit:
  """Split of each row's beginning into the encoder's chunks.

  Attributes:
    chunk: Tokens of a chunk.
    chunks: Number of chunks.
    repeated: Whether the decoder reads them, too (CEPE's warm-up, in which the
      encoder's states are of the decoder's own tokens), and not only the rest.
    hit: Fraction of the chunks that are masked in part.
    whole: Fraction of these that are masked completely; the others lose a
      suffix of random length.
  """

  chunk: int
  chunks: int
  repeated: bool = False
  hit: float = 0.3
  whole: float = 0.1

  def __post_init__(self) -> None:
    for name in ("chunk", "chunks"):
      positive_int(name, getattr(self, name))
    for name in ("hit", "whole"):
      number(name, getattr(self, name), least=0, most=1)

  @property
  def tokens(self) -> int:
    """Tokens of a row that the encoder reads."""
    return self.chunk * self.chunks

  def decoded(self, length: int) -> int:
    """Tokens of a row of `length` that the decoder reads."""
    return length if self.repeated else length - self.tokens

  def split(
    self, rows: PackedBatch | Batch, seed: int, *, teacher: bool = False
  ) -> Batch:
    """Splits packed rows, NumPy arrays in token order, into a batch.

    Args:
      rows: A `PackedBatch` [B, T].
      seed: Seed of the mask.
      teacher: Whether a teacher reads the whole rows.
    """
    count = len(rows.tokens)
    chunks = lambda x: x[:, : self.tokens].reshape(count, self.chunks, -1)
    seg = np.minimum(chunks(rows.segments), 1).astype(np.int32)
    mask = np.stack([self._kept(row, seed) for row in rows.tokens])
    first = 0 if self.repeated else self.tokens
    decoder_fields: list[Any] = [
      np.asarray(getattr(rows, name))[:, first:] for name in BY_TOKEN
    ]
    positions = decoder_fields[-2]
    # The positions of a document that the split cuts begin at 0 again.
    cut = decoder_fields[-1] == decoder_fields[-1][:, :1]
    positions = positions - np.where(cut, positions[:, :1], 0)
    return Batch(
      *decoder_fields[:3],
      positions=positions,
      segments=decoder_fields[-1],
      context=Chunks(chunks(rows.tokens), seg * mask),
      whole=Batch(*(getattr(rows, name) for name in BY_TOKEN))
      if teacher
      else None,
    )

  def _kept(self, row: np.ndarray, seed: int) -> np.ndarray:
    """Mask of a row's context, int32 [k, C]; 0 where it is masked."""
    code = zlib.crc32(np.ascontiguousarray(row).tobytes())
    draw = np.random.default_rng([seed, code])
    ends = np.full(self.chunks, self.chunk)
    hit = draw.random(self.chunks) < self.hit
    ends[hit] = draw.integers(1, max(2, self.chunk), self.chunks)[hit]
    ends[hit & (draw.random(self.chunks) < self.whole)] = 0
    return (np.arange(self.chunk) < ends[:, None]).astype(np.int32)
