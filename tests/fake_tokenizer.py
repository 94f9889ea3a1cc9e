"""A tokenizer of 64 tokens: pieces of one to three characters, and two halves of one emoji."""

from __future__ import annotations

EOS, END_OF_TURN = 0, 1
FIRST_HALF, SECOND_HALF = 2, 3  # of U+1F917, four bytes
EMOJI = "\U0001f917"
PIECES = [b"", b"", EMOJI.encode()[:3], EMOJI.encode()[3:]]
PIECES += [c.encode() for c in "abcdefghijklmnopqrstuvwxyz .\n"]
PIECES += [(a + b).encode() for a in "abcde" for b in "abcd ."] + [b"the"]
VOCAB_SIZE = len(PIECES)
assert VOCAB_SIZE == 64


class FakeTokenizer:
    """The part of rvllm.tokenizer.Tokenizer that engine and Detokenizer use. BOS and EOS are never added."""

    add_space_prefix = False
    eog_token_ids = frozenset({EOS, END_OF_TURN})

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        return [PIECES.index(c.encode()) for c in text]

    def token_bytes(self, token_id: int, special: bool = False) -> bytes:
        if token_id in self.eog_token_ids:
            return f"<{token_id}>".encode() if special else b""
        return PIECES[token_id]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id, special=True).decode("utf-8", "replace")


def text_of(token_ids: list[int]) -> str:
    return b"".join(PIECES[token_id] for token_id in token_ids).decode("utf-8", "replace")
