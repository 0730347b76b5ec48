"""Byte-pair tokenizers from GGUF metadata or ``tokenizer.json``, and streamed decoding."""

from __future__ import annotations

import codecs
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

# Pre-tokenizer splits that are not the byte-level one of GPT-2, as published with the models.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Text <-> token ids.

    Made by ``from_gguf`` or ``from_folder``.

    Attributes:
        bos_id: Start token, or None.
        eos_id: Token that ends an answer, or None.
        special_tokens: "bos_token", "eos_token", ... -> text, as chat templates want them.
        chat_template: Source of the chat template that came with the tokenizer, or None.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        """Wraps a ``tokenizers.Tokenizer``; ``add_bos``: encode() puts the start token first."""
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self._add_bos = add_bos and self.bos_id is not None
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        state = json.loads(tokenizer.to_str())
        self._byte_level = (state.get("decoder") or {}).get("type") == "ByteLevel"

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes.

        Args:
            metadata: The file's key/value pairs. ``tokenizer.ggml.model`` must be "gpt2"
                (byte-level BPE).
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models

        where = "Tokenizer.from_gguf"
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ValueError(
                f"{where}: tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {kind!r}"
            )
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise ValueError(f"{where}: tokenizer.ggml.tokens must be a list, got {tokens!r}")
        types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
        merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
        tokenizer.decoder = decoders.ByteLevel()
        # Added in the order of their ids: equal text at one place goes to the longest match, not to
        # the first.
        for token, token_type in zip(tokens, types, strict=True):
            if token_type in (_CONTROL, _USER_DEFINED):
                added = AddedToken(token, special=token_type == _CONTROL, normalized=False)
                tokenizer.add_special_tokens([added]) if added.special else tokenizer.add_tokens(
                    [added]
                )
        special = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None:
                if not 0 <= token_id < len(tokens):
                    raise ValueError(
                        f"{where}: tokenizer.ggml.{key}_token_id must be below {len(tokens)}, got "
                        f"{token_id}"
                    )
                special[f"{name}_token"] = tokens[token_id]
        return cls(
            tokenizer,
            special_tokens=special,
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
        from tokenizers import Tokenizer

        folder = pathlib.Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"Tokenizer.from_folder: folder must hold tokenizer.json, got {folder} without it"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises plain Exception
            raise ValueError(
                f"Tokenizer.from_folder: {file} must be a tokenizer.json, got: {error}"
            ) from error
        config_file, template_file = (
            folder / "tokenizer_config.json",
            folder / "chat_template.jinja",
        )
        config = (
            json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        )
        special = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None:
                special[name] = text
        template = config.get("chat_template")
        if template_file.is_file():
            template = template_file.read_text(encoding="utf-8")
        # A start token, where the model wants one, is put in front by tokenizer.json's own
        # post-processor.
        return cls(
            tokenizer,
            special_tokens=special,
            chat_template=template if isinstance(template, str) else None,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written in it (``<|im_start|>``) become their ids.

        Args:
            text: Any text.
            add_special_tokens: Whether the start token is put in front where the model wants it.
                Rendered chat templates hold all they need: pass False for them.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._add_bos:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for one token at a time."""
        return TextStream(self, skip_special_tokens)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)


class TextStream:
    """Turns a stream of tokens into a stream of text that never splits a character.

    A token may hold part of a character's bytes. ``put`` keeps such bytes back until the character
    is whole, and ``end`` gives what is left. The pieces joined are ``Tokenizer.decode`` of all the
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._owner = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # all tokens, for decoders that look at neighbours
        self._shown = ""

    def put(self, token_id: int) -> str:
        """Adds a token; returns the text that is complete now (often one piece, maybe empty)."""
        if self._skip and token_id in self._owner._special_ids:
            return ""
        if self._owner._byte_level:
            token = self._owner._tokenizer.id_to_token(token_id)
            return "" if token is None else self._utf8.decode(_token_bytes(token))
        # Other decoders (SentencePiece with byte fallback) look at neighbours: decode everything,
        # and show what the text grew by once it ends in a whole character.
        self._window.append(token_id)
        text = self._owner.decode(self._window, self._skip)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def end(self) -> str:
        """Text still held back: an incomplete character, as U+FFFD."""
        if self._owner._byte_level:
            return self._utf8.decode(b"", final=True)
        text = self._owner.decode(self._window, self._skip)
        return text[len(self._shown) :]


def _pre_tokenizer(name: str) -> Any:
    """The split before BPE that ``tokenizer.ggml.pre`` names."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("llama-bpe", "llama3", "llama-v3"):
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    raise ValueError(
        "Tokenizer.from_gguf: tokenizer.ggml.pre must be 'default', 'gpt-2', 'smollm' or "
        "'llama-bpe', "
        f"got {name!r}"
    )


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: each byte as a printable character, from U+0100 on where it has none."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in own}
    others = (byte for byte in range(256) if byte not in own)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def _token_bytes(token: str) -> bytes:
    """Bytes that a byte-level token stands for.

    A token with characters outside the alphabet (some special tokens) stands for its own text.
    """
    try:
        return bytes(_BYTE_OF_CHAR[c] for c in token)
    except KeyError:
        return token.encode("utf-8")
