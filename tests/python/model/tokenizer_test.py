"""Tokenizer and chat template of SmolLM2 against transformers'; streamed decoding."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from astrai.model import ChatTemplate, Tokenizer
from astrai.model.gguf_file import GGUFFile
from tests.python.model import smollm2

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "It's we'll they'd I'm you've CAN'T don't",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\r\n\r\n\n\n  mixed \n \t ",
    "def f(x: int) -> str:\n    return f'{x!r}' if x else \"none\"  # comment\n",
    '{"key": [1, 2.5, -3e10], "nested": {"a": null}}',
    "naïve café Übermaß œuvre smørrebrød",
    "e\u0301 combining, \u00e9 composed, \u1e69 s\u0323\u0307",
    "Привет, мир! Γειά σου Κόσμε",
    "日本語の文章。漢字とかな、カタカナ。中文测试",
    "שלום עולם مرحبا بالعالم",
    "हिन्दी में पाठ ไทย ភាសាខ្មែរ",
    "😀 😃😄 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "\x00\x01\x1b[31m\x7f\u200b\u200d\ufeff\u2028\ufffd",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start|><|im_",
    "<|im_end|>|> <|im_start |> <repo_name>x<reponame><jupyter_code>",
    "a" * 500 + " " * 100 + "é" * 50,
    "https://example.org/path?q=a%20b&c=d#frag user@example.org",
)
NUMBERS = (
    "1234567890 3.14159 1,000,000 0x1F",
    "a 1  2   3\n  4\n\n5",
    "½ ² x³ ⅷ  ¾",
    "١٢٣ ٤  १२३ ３",
)


@pytest.fixture(scope="module")
def metadata() -> dict:
    return GGUFFile(smollm2.path()).metadata


@pytest.fixture(scope="module")
def ours(metadata) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="module")
def theirs():
    return smollm2.reference_tokenizer()


def random_texts(alphabet: str, count: int) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(count)]


def test_vocabulary(ours, theirs):
    assert ours.vocab_size == len(theirs) == 49152
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)
    assert ours.special_tokens == dict(theirs.special_tokens_map)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encode_equals_transformers(ours, theirs, text):
    assert ours.encode(text) == theirs.encode(text)


def test_encode_equals_transformers_on_random_text(ours, theirs):
    for text in random_texts("abcXYZ 'st.,;!?\n\t _-(){}éßж漢字😀\u0301\u200d<|im_start|>", 1500):
        assert ours.encode(text) == theirs.encode(text), repr(text)


def test_numbers_split_before_bpe_as_the_file_says(ours, theirs):
    """The file's tokenizer.ggml.pre is 'smollm': each digit stands alone before BPE.

    transformers ignores that key and splits like GPT-2, which differs in the blanks before a
    number; with the split that the model was trained with it must agree.
    """
    split = theirs.backend_tokenizer.pre_tokenizer
    texts = [*NUMBERS, *random_texts("ab 0123456789 .,\n²½１٣", 1000)]
    assert any(ours.encode(text) != theirs.encode(text) for text in texts)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), split]
    )
    try:
        for text in texts:
            assert ours.encode(text) == theirs.encode(text), repr(text)
    finally:
        theirs.backend_tokenizer.pre_tokenizer = split
    for digit in "0123456789":
        assert ours.encode(f"a {digit}{digit}")[-2:] == ours.encode(digit) * 2


@pytest.mark.parametrize("text", TEXTS + NUMBERS, ids=range(len(TEXTS + NUMBERS)))
def test_decode_gives_the_text_back(ours, theirs, text):
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == text
    plain = theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert plain == text


@pytest.mark.parametrize("skip", [False, True])
def test_stream_gives_whole_characters_and_loses_nothing(ours, skip):
    for text in TEXTS + NUMBERS:
        ids, stream = ours.encode(text), ours.stream(skip)
        pieces = [stream.put(token) for token in ids] + [stream.end()]
        assert "".join(pieces) == ours.decode(ids, skip)
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces), "a character was split"


def test_stream_equals_decode_for_random_tokens(ours):
    """Random tokens are mostly broken UTF-8: what comes out must still be what decode gives."""
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.choice((rng.randrange(49152), rng.randrange(94, 300))) for _ in range(20)]
        stream = ours.stream()
        assert "".join([stream.put(t) for t in ids] + [stream.end()]) == ours.decode(ids)


def test_stream_holds_an_incomplete_character_back(ours):
    ids = [token for token in ours.encode("\u1f02") if ours.decode([token]) == "\ufffd"]
    assert len(ids) >= 2
    stream = ours.stream()
    assert [stream.put(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.end() == "\ufffd"


def test_stream_of_a_byte_fallback_tokenizer():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({"<unk>": 256, "▁a": 257, "b": 258, "▁": 259})
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    tokenizer = Tokenizer(rust)
    ids = [257, 258, *"é😀".encode(), 257, 0xE2, 0x82]
    stream = tokenizer.stream()
    pieces = [stream.put(token) for token in ids]
    assert pieces[:8] == ["a", "b", "", "é", "", "", "", "😀"]
    assert "".join([*pieces, stream.end()]) == tokenizer.decode(ids)


CONVERSATIONS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 < 3 & 'q' \"é\"?"}],
    [
        {"role": "user", "content": "A\nB"},
        {"role": "assistant", "content": " C "},
        {"role": "user", "content": "D😀"},
    ],
)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(3))
def test_chat_template_equals_transformers(ours, theirs, metadata, messages, add_generation_prompt):
    template = ChatTemplate(metadata["tokenizer.chat_template"], ours.special_tokens)
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    rendered = template.render(messages, add_generation_prompt)
    assert rendered == expected
    assert ours.encode(rendered, add_special_tokens=False) == theirs.encode(expected)


def test_chat_template_is_sandboxed_and_reports_errors():
    with pytest.raises(ValueError, match="must be a Jinja template"):
        ChatTemplate("{% if %}")
    with pytest.raises(ValueError, match="must suit the template"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="no system"):
        ChatTemplate("{{ raise_exception('no system') }}").render([])
    with pytest.raises(ValueError, match=r"messages must suit the template, got: .*zero"):
        ChatTemplate("{{ 1 // 0 }}").render([])
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\] must be a string, got None"):
        ChatTemplate("").render([{"role": "user"}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "model must be 'gpt2'"),
        ({"tokenizer.ggml.pre": "klingon"}, "pre must be .*got 'klingon'"),
        ({"tokenizer.ggml.eos_token_id": 9}, "eos_token_id must be below 2, got 9"),
    ],
)
def test_unknown_tokenizers_are_refused(change, message):
    small = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    assert Tokenizer.from_gguf(small).encode("ab") == [0, 1]
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf({**small, **change})


def test_add_bos_token():
    small = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "a"],
        "tokenizer.ggml.token_type": [3, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = Tokenizer.from_gguf(small)
    assert tokenizer.encode("a") == [0, 1]
    assert tokenizer.encode("a", add_special_tokens=False) == [1]
