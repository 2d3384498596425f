"""Rules that compare an answer with the correct ones.

Formulas of the benchmarks: F1 of words as in SQuAD
(Rajpurkar et al. 2016, arXiv 1606.05250), ROUGE-L of summaries (Lin 2004),
NDCG (Jarvelin and Kekalainen 2002).
"""

# ruff: noqa: RUF001

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORDS = re.compile(r"[a-z0-9]+")
# Marks that CMRC's rule removes besides ASCII's.
_CJK_MARKS = (
  "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞"
  "〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def contained(answers: Iterable[str], completion: str) -> list[bool]:
  """Whether a completion contains each answer, whatever the case."""
  lower = completion.lower()
  return [answer.lower() in lower for answer in answers]


def normalized(text: str) -> str:
  """Lower-case text without ASCII punctuation, articles and extra spaces."""
  marks = {ord(mark): None for mark in string.punctuation}
  return " ".join(_ARTICLES.sub(" ", text.lower().translate(marks)).split())


def normalized_chinese(text: str) -> str:
  """Lower-case text without punctuation and spaces."""
  marks = {ord(mark): None for mark in string.punctuation + _CJK_MARKS}
  return "".join(text.lower().translate(marks).split())


def overlap_f1(predicted: Sequence[str], correct: Sequence[str]) -> float:
  """F1 of two bags of words."""
  shared = sum((Counter(predicted) & Counter(correct)).values())
  if not shared:
    return 0.0
  precision, recall = shared / len(predicted), shared / len(correct)
  return 2 * precision * recall / (precision + recall)


def words_f1(answers: Iterable[str], completion: str) -> float:
  """Highest F1 of normalised words over the answers."""
  words = normalized(completion).split()
  return max(overlap_f1(words, normalized(x).split()) for x in answers)


def characters_f1(answers: Iterable[str], completion: str) -> float:
  """Highest F1 of normalised characters over the answers, for Chinese."""
  characters = normalized_chinese(completion)
  return max(overlap_f1(characters, normalized_chinese(x)) for x in answers)


def rouge_lsum(answer: str, completion: str) -> float:
  """F1 of ROUGE-Lsum, without stemming; a line is a sentence.

  The longest common subsequence of each line of the answer with each line of
  the completion marks words of the answer; each marked word counts as often as
  both texts have it.
  """
  targets = [_WORDS.findall(line.lower()) for line in answer.split("\n")]
  lines = [_WORDS.findall(line.lower()) for line in completion.split("\n")]
  targets, lines = [x for x in targets if x], [x for x in lines if x]
  target_size, size = sum(map(len, targets)), sum(map(len, lines))
  if not target_size or not size:
    return 0.0
  target_left = Counter(word for words in targets for word in words)
  predicted_left = Counter(word for words in lines for word in words)
  hits = 0
  for words in targets:
    marked = sorted({n for line in lines for n in _common(words, line)})
    for word in (words[n] for n in marked):
      if target_left[word] > 0 and predicted_left[word] > 0:
        hits += 1
        target_left[word] -= 1
        predicted_left[word] -= 1
  if not hits:
    return 0.0
  precision, recall = hits / size, hits / target_size
  return 2 * precision * recall / (precision + recall)


def _common(target: Sequence[str], line: Sequence[str]) -> list[int]:
  """Places in `target` of a longest common subsequence with `line`."""
  rows, columns = len(target), len(line)
  lengths = [[0] * (columns + 1) for _ in range(rows + 1)]
  for i in range(rows):
    for j in range(columns):
      if target[i] == line[j]:
        lengths[i + 1][j + 1] = lengths[i][j] + 1
      else:
        lengths[i + 1][j + 1] = max(lengths[i][j + 1], lengths[i + 1][j])
  places, i, j = [], rows, columns
  while i and j:
    if target[i - 1] == line[j - 1]:
      places.append(i - 1)
      i, j = i - 1, j - 1
    elif lengths[i][j - 1] > lengths[i - 1][j]:
      j -= 1
    else:
      i -= 1
  return places[::-1]


def ndcg(relevance: Mapping[str, int], ranking: Sequence[str], k: int) -> float:
  """Normalised discounted cumulative gain of the first `k` ranked items.

  Args:
    relevance: Gain of each item; those that are missing have 0.
    ranking: Items, best first.
    k: Number of items that count.
  """
  gain = lambda gains: sum(
    x / math.log2(n + 2) for n, x in enumerate(gains[:k])
  )
  ideal = gain(sorted((x for x in relevance.values() if x > 0), reverse=True))
  if not ideal:
    return 0.0
  return gain([max(relevance.get(item, 0), 0) for item in ranking]) / ideal
