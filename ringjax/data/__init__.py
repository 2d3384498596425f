"""Text and tokens: tokenizers, chat templates, streams of decoded text.

Nothing here knows JAX. The libraries behind it (tokenizers, jinja2) are loaded
when something of theirs is used, not when this package is imported.
"""

from ringjax.data.bytelevel import Bytes
from ringjax.data.chat import ChatTemplate
from ringjax.data.stream import Stream
from ringjax.data.tokens import Tokenizer

__all__ = ["Bytes", "ChatTemplate", "Stream", "Tokenizer"]
