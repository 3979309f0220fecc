"""SentencePiece's way through a text, as llama.cpp goes it: the best neighbours are joined until none are left."""

from __future__ import annotations

from collections.abc import Mapping


def tokenize(text: str, scores: Mapping[str, float], ids: Mapping[str, int]) -> list[int]:
    """Token ids of a text whose spaces are marked already.

    Args:
        text: any.
        scores: of each token; of equally good pairs the leftmost is joined first.
        ids: of each token; a character that is none becomes its bytes, <0x00> to <0xFF>.
    """
    symbols = list(text)
    while True:
        pairs = [
            (-scores[joined], at) for at in range(len(symbols) - 1) if (joined := "".join(symbols[at : at + 2])) in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found
