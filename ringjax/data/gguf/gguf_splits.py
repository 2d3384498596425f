"""Text splits of byte-level tokenizers of GGUF files, by the name in a file.

Guarantees: parts are those of llama.cpp's regular expressions for the name, or
of the original tokenizer's where llama.cpp names it as its source.
Ref: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, the types of
pre-tokenizers.
"""

from __future__ import annotations

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r"|\s+(?!\S)|\s+"
)


def _words(
  digits: str,
  *,
  letters: str = r"\p{L}+",
  rest: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
  endings: str = _ENDINGS + "|",
  breaks: str = _BREAKS,
) -> str:
  """Words with a sign or space before them, numbers, signs and spaces."""
  return rf"{endings}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{rest}{breaks}"


def _cased(digits: str, endings: str = "") -> str:
  """Words whose small letters follow capital ones (o200k, Tekken)."""
  capital, small = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
  lead = r"[^\r\n\p{L}\p{N}]?"
  return (
    rf"{lead}[{capital}]*[{small}]+{endings}"
    rf"|{lead}[{capital}]+[{small}]*{endings}"
    rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_BREAKS}"
  )


_THREE, _DIGIT = r"\p{N}{1,3}", r"\p{N}"
_LLAMA3 = _words(_THREE)
_QWEN2 = _words(_DIGIT)
_ENGLISH = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Letters with a case in the Unicode that DeepSeek's first tokenizer knows.
_CASED_LETTERS = (
  "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf"
  "\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f"
  "\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
  "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
  "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
  "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
  "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
  "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
  "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126"
  "\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
  "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
  "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
  "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
  "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
  "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
  "\U0001e900-\U0001e943"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
  r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
  r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _BREAKS
)
_BAILING = _words(
  _DIGIT, endings=r"'(?i:[sdmt]|ll|ve|re)|", breaks=r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _names(text: str, *splits: str) -> dict[str, tuple[str, ...]]:
  return dict.fromkeys(text.split(), splits)


# Regular expressions by name; each is applied to the parts of those before.
# Text that none of them matches is a separate part.
SPLITS: dict[str, tuple[str, ...]] = {
  **_names("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
           _LLAMA3),
  **_names("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3),
  **_names("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan "
           "solar-open grok-2", _QWEN2),
  **_names("qwen35", _words(_DIGIT, letters=r"[\p{L}\p{M}]+",
                            rest=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")),
  **_names("laguna", r"[^\n]+|[\n]+", _QWEN2),
  **_names("ufakzeka", _words(_DIGIT, endings="")),
  **_names("seed-coder", _words(_DIGIT, rest=r" ?[^\s\p{L}\p{N}\r\n]+")),
  **_names("bailingmoe bailingmoe2 llada-moe", _BAILING),
  **_names("minicpm5", _THREE, _words(r"\p{N}+")),
  **_names("exaone-moe", _words(
    _DIGIT, letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    rest=r" ?[^\s\p{L}\p{N}]+[\r\n/]?", breaks=r"|\s*[\r\n]|\s+(?!\S)|\s+",
  )),
  **_names("gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion "
           "granite-docling exaone4", _GPT2),
  **_names("smollm starcoder refact command-r codeshell exaone minerva-7b "
           "mellum2", _DIGIT, _GPT2),
  **_names("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
  # Of files whose converter did not know the tokenizer.
  **_names("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+",
           "[0-9][0-9][0-9]"),
  **_names("bloom poro-chat gpt3-finnish", _ENGLISH),
  **_names("viking", _ENGLISH, _DIGIT),
  **_names("tekken", _cased(_DIGIT)),
  **_names("gpt-4o llama4 kanana2 talkie minimax-m2",
           _cased(_THREE, _ENDINGS + "?")),
  **_names("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)",
           _cased(_THREE, _ENDINGS + "?")),
  **_names("deepseek-v3 hunyuan-dense", _THREE,
           "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
  **_names("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN,
           _DIGIT),
  **_names("deepseek-llm", r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+",
           "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
           r"\s+$", _HAN, r"\p{N}+"),
  **_names("chameleon", "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z",
           r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
}  # fmt: skip
# Names of tokenizers that take a word that is a token as one, whatever merges.
WHOLE_WORDS = frozenset({
  "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral",
  "midm-2.0", "lfm2", "tekken",
})  # fmt: skip
# Names of tokenizers that put the bos_token before a text if the file does not
# say.
ADDS_BOS = WHOLE_WORDS | {"chameleon"}
