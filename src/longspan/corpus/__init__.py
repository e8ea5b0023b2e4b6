"""From files of text, rows, chats and images to a folder of arrays that steps read.

>>> from longspan.corpus import Row, RowEncoding, load_tokenizer, train_tokenizer
"""

from typing import TYPE_CHECKING

from longspan.lazy import lazy_exports

if TYPE_CHECKING:
    from longspan.corpus.rows.encoding import RowEncoding as RowEncoding
    from longspan.corpus.rows.sample import Row as Row
    from longspan.corpus.tokenizer import load_tokenizer as load_tokenizer, train_tokenizer as train_tokenizer

__getattr__, __dir__, __all__ = lazy_exports(__name__)
