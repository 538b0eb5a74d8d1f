"""Counts a prompt's tokens with its model's own tokenizer, for models that one is configured for (`models.tokenizers`).

What is counted is the text of the prompt, without the template that a server puts around it; that, and what images are
worth, is learned from servers' counts as it is for bytes. Needs the extra `tokenizer` (Hugging Face's `tokenizers`) and
a `tokenizer.json`, which is read from disk and never fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from common.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COUNTED_CHARS: Final = 1 << 20  # of a prompt; a longer one is estimated from its bytes


class Tokenizers:
    """Tokenizers by model; a model that ends with `*` stands for all that begin so. Raises ConfigError."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._loaded = {model: _load(file) for model, file in files.items()}

    def __bool__(self) -> bool:
        return bool(self._loaded)

    def has(self, model: str) -> bool:
        """Whether there is one for this model."""
        return self._of(model) is not None

    def _of(self, model: str) -> Tokenizer | None:
        found = self._loaded.get(model)
        if found is None and self._loaded:
            found = next((t for m, t in self._loaded.items() if m.endswith("*") and model.startswith(m[:-1])), None)
        return found

    def count(self, model: str, text: str) -> int | None:
        """Tokens of a text; None for a model without one, or a very long text. About a microsecond a token."""
        tokenizer = self._of(model)
        if tokenizer is None or len(text) > COUNTED_CHARS:
            return None
        return len(tokenizer.encode(text, add_special_tokens=False).ids)


def verify(files: Mapping[str, str]) -> None:
    """Raise ConfigError where the extra or a file is missing. Reads none."""
    if files and find_spec("tokenizers") is None:
        raise ConfigError("models.tokenizers needs the extra: pip install 'headwater[tokenizer]'")
    for file in files.values():
        if not Path(file).is_file():
            raise ConfigError(f"models.tokenizers: there is no file {file}")


def _load(file: str) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"models.tokenizers: {file} is no tokenizer.json: {str(error)[:200]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
