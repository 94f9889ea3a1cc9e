"""Ids of small vocabularies against llama.cpp's, and against the library `tokenizers` set up as the models' files do.

tests/data/llama_cpp_ids.json is made by scripts/make_llama_cpp_ids.py. Where llama.cpp and a model's own
tokenizer.json differ, the model's own is right; every such place is named here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken
from trained_vocabularies import (
    EOG_CANDIDATES,
    SPM_VARIANTS,
    TEXTS,
    control_metadata,
    merges,
    trained_bpe_metadata,
    trained_spm_metadata,
)
from vocabularies import CONTROL, USER_DEFINED

from rvllm.pre_tokenizers import PRE_TOKENIZERS
from rvllm.tokenizer import Tokenizer
from rvllm.vocabulary import TokenType

LLAMA_CPP = json.loads((Path(__file__).parent / "data" / "llama_cpp_ids.json").read_text("ascii"))

# llama.cpp stands [^a-z] and [^A-Z] in for classes such as \p{Lu}: combining marks, and capitals beyond ASCII.
CASE_CLASSES = {39, 40, 44, 47, 48}
# There it reads \p{Lu} itself as something else, and \b as a border of ASCII words.
WRONG_CLASSES = {24, 33, 48}
OWN_IS_RIGHT = {
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie", "tekken"), CASE_CLASSES),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), WRONG_CLASSES),
}
TWO_BOS = 62  # the text that begins with "<s>": llama.cpp adds another one


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_byte_level_bpe(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(trained_bpe_metadata(pre))
    assert differing(tokenizer, pre, parse_special=False) == OWN_IS_RIGHT.get(pre, set())


def test_byte_level_bpe_with_special_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(trained_bpe_metadata("gpt-2"))
    assert differing(tokenizer, "gpt-2 with special tokens", parse_special=True) == set()


def differing(tokenizer: Tokenizer, name: str, parse_special: bool) -> set[int]:
    """Numbers of the texts whose ids are not those that llama.cpp gave for this name."""
    numbers = set()
    for number, (text, row) in enumerate(zip(TEXTS, LLAMA_CPP["bpe"], strict=True)):
        [expected] = (ids for ids, names in row.items() if name in names.split(", "))
        if tokenizer.encode(text, parse_special=parse_special) != [int(id) for id in expected.split()]:
            numbers.add(number)
    return numbers


@pytest.mark.parametrize("variant", SPM_VARIANTS)
def test_sentencepiece(variant: str) -> None:
    keys, parse_special = SPM_VARIANTS[variant]
    tokenizer = Tokenizer.from_gguf(trained_spm_metadata(**keys))
    for number, (text, expected) in enumerate(zip(TEXTS, LLAMA_CPP["spm"][variant], strict=True)):
        ids = [int(id) for id in expected.split()]
        if number == TWO_BOS and parse_special:
            assert ids[:2] == [1, 1]
            del ids[0]
        assert tokenizer.encode(text, parse_special=parse_special) == ids, text


@pytest.mark.parametrize("candidates", EOG_CANDIDATES)
def test_tokens_that_end_a_generation(candidates: str) -> None:
    tokenizer = Tokenizer.from_gguf(control_metadata(candidates.split()))
    ends = {tokenizer.token_text(id) for id in tokenizer.eog_token_ids} - {"\0"}  # id 0, which the file names
    assert ends == set(LLAMA_CPP["end tokens"][candidates].split())


# --- The library, with the pre-tokenizers of the models' own files

SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"


def cased(end: str) -> str:
    return f"{LEAD}{UPPER}*{LOWER}+{end}|{LEAD}{UPPER}+{LOWER}*{end}"


def split(*expressions: str) -> list[dict[str, Any]]:
    rest = {"behavior": "Isolated", "invert": False}
    return [{"type": "Split", "pattern": {"Regex": expression}, **rest} for expression in expressions]


def byte_level(use_regex: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


DIGITS = {"type": "Digits", "individual_digits": True}
MODEL_FILES: dict[str, list[dict[str, Any]]] = {
    "gpt-2 olmo mpt exaone4": [byte_level(use_regex=True)],
    "starcoder refact smollm command-r": [DIGITS, byte_level(use_regex=True)],
    "llama-bpe dbrx falcon3 smaug-bpe": [
        *split(rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"),
        byte_level(),
    ],
    "qwen2 deepseek-r1-qwen stablelm2": [
        *split(rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{SYMBOLS}|{SPACES}"),
        byte_level(),
    ],
    "tekken": [
        *split(rf"{cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"),
        byte_level(),
    ],
    "gpt-4o llama4": [
        *split(rf"{cased(CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"),
        byte_level(),
    ],
    "deepseek-coder": [
        *split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        DIGITS,
        byte_level(),
    ],
    "deepseek-v3": [
        *split(
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ),
        byte_level(),
    ],
}
IGNORE_MERGES = {"llama-bpe", "falcon3", "tekken"}


@pytest.mark.parametrize("name", [name for names in MODEL_FILES for name in names.split()])
def test_models_own_files(name: str) -> None:
    [steps] = (steps for names, steps in MODEL_FILES.items() if name in names.split())
    metadata = trained_bpe_metadata(name, add_bos_token=False)
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    first = len(tokens) - len(CONTROL) - len(USER_DEFINED)
    file = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": first + i,
                "content": text,
                "special": text in CONTROL,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, text in enumerate([*CONTROL, *USER_DEFINED])
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(tokens[:first])},
            "merges": [list(pair) for pair in merges()],
            "ignore_merges": name in IGNORE_MERGES,
        },
    }
    library = tokenizers.Tokenizer.from_str(json.dumps(file))
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_models_own_file(prefix: bool) -> None:
    """As Llama's tokenizer.json has it: the merges are every way to make a piece of two, in the order of its score."""
    metadata = trained_spm_metadata(add_bos_token=False, add_space_prefix=prefix)
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    types: Any = metadata["tokenizer.ggml.token_type"]
    vocab = {token: id for id, token in enumerate(tokens)}
    pieces = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL]
    joins = [(piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece))]
    known = set(pieces)
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab,
            [pair for pair in joins if known.issuperset(pair)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = tokenizers.normalizers.Replace(" ", "\u2581")
    prepend = [tokenizers.normalizers.Prepend("\u2581")] if prefix else []
    library.normalizer = tokenizers.normalizers.Sequence([*prepend, replace])
    control = [
        t for t, kind in zip(tokens, types, strict=True) if kind in (TokenType.UNKNOWN, TokenType.CONTROL)
    ]
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    library.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("\u2581", " ")


# --- Tokens that take in white space


def test_phi3_tokens_take_in_the_white_space_behind_them() -> None:
    metadata = trained_spm_metadata(**{"general.architecture": "phi3"})
    phi3, plain = (
        Tokenizer.from_gguf(m | {"tokenizer.ggml.add_bos_token": False})
        for m in (metadata, trained_spm_metadata())
    )
    text = "<|im_start|>\n hi<|im_end|>\n\n<|im_start|> \t"
    assert phi3.encode(text, parse_special=True) == plain.encode(
        "<|im_start|>hi<|im_end|><|im_start|>", parse_special=True
    )
    for kept in ("<|endoftext|> hi", "hi <|im_end|>"):
        assert phi3.encode(kept, parse_special=True) == plain.encode(kept, parse_special=True)
    # Of another architecture, and of Phi-4-mini, which has a byte-level vocabulary, no token does.
    assert plain.decode(plain.encode(text, parse_special=True), skip_special_tokens=False) == text
    bpe = Tokenizer.from_gguf(trained_bpe_metadata("gpt-4o") | {"general.architecture": "phi3"})
    assert bpe.decode(bpe.encode(text, parse_special=True), skip_special_tokens=False) == text


def test_a_tokenizer_file_says_what_takes_in_white_space(tmp_path: Path) -> None:
    metadata = trained_bpe_metadata("gpt-2")
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    vocab = {token: id for id, token in enumerate(tokens[: -len(CONTROL) - len(USER_DEFINED)])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges()))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    strips = {"<|im_start|>": {"rstrip": True}, "<|im_end|>": {"lstrip": True}}
    library.add_special_tokens(
        [AddedToken(t, special=True, normalized=False, **strips.get(t, {})) for t in CONTROL]
    )
    library.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", metadata)
    text = "<|im_start|> \n hi \n<|im_end|> ."
    pieces = tokenizer.split_control(text)
    assert [piece for piece in pieces if isinstance(piece, str)] == ["hi", " ."]
    joined = [id for p in pieces for id in ([p] if isinstance(p, int) else tokenizer.encode(p))]
    assert joined == tokenizer.encode(text, parse_special=True)


# --- What is refused


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("bert", "WordPiece"),
        ("t5", "SentencePiece's unigram"),
        ("rwkv", "RWKV's"),
        ("plamo2", "PLaMo-2's"),
        ("gemma4", "BPE without bytes"),
    ],
)
def test_other_kinds_of_vocabulary_are_refused_by_name(model: str, kind: str) -> None:
    expected = rf"^tokenizer\.ggml\.model: '{model}' \({kind}\) is not supported; supported are 'gpt2' .* 'llama' .*$"
    with pytest.raises(ValueError, match=expected):
        Tokenizer.from_gguf(trained_spm_metadata(model=model))


def test_an_unknown_pre_tokenizer_is_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError) as error:
        Tokenizer.from_gguf(trained_bpe_metadata("kimi-k2"))
    message = str(error.value)
    assert (
        message.startswith("tokenizer.ggml.pre: 'kimi-k2' is not known; known are ") and "\n" not in message
    )
    assert set(message.rpartition("known are ")[2].split(", ")) == set(PRE_TOKENIZERS)


def test_scores_without_byte_tokens_or_merges_are_enough() -> None:
    metadata = trained_spm_metadata(byte_tokens=False)
    types: Any = metadata["tokenizer.ggml.token_type"]
    assert "tokenizer.ggml.merges" not in metadata and TokenType.BYTE not in types
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (
        tokenizer.encode("hi \u0416\u2603", add_special_tokens=False)[-1] == tokenizer.vocabulary.unknown_id
    )


def test_the_data_are_what_llama_cpp_gives() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from make_llama_cpp_ids import bpe_ids, end_tokens, spm_ids

    assert {"bpe": bpe_ids(), "spm": spm_ids(), "end tokens": end_tokens()} == LLAMA_CPP
