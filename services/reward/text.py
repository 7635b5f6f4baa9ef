"""Comparing what was read with what was asked for, as the field's OCR reward does.

Target: what stands between the first pair of double quotes of the prompt. Both texts without white space, in lower
case. Distance: 0 if the target is contained in the text read, else Levenshtein's, at most len(target).
Score = 1 − distance / len(target). Source: flow_grpo's `OcrScorer`.
"""

import unicodedata

from rapidfuzz.distance import Levenshtein

MAX_TARGET_LENGTH = 512
"""Longer targets are refused: no line of text has so many characters."""


def target_of(prompt: str, alphanumeric: bool = False) -> str:
    """The normalized target of a prompt, 1 … `MAX_TARGET_LENGTH` characters. ValueError says what the prompt lacks."""
    parts = prompt.split('"', 2)
    if len(parts) < 3:
        raise ValueError('the prompt names no text: put it between double quotes, as in: a sign that says "OPEN"')
    if len(parts[1]) > MAX_TARGET_LENGTH:
        raise ValueError(f"the quoted text has {len(parts[1])} characters, at most {MAX_TARGET_LENGTH} can be compared")
    target = normalize(parts[1], alphanumeric)
    if not target:
        raise ValueError(
            f"the quoted text has no {'letters or digits' if alphanumeric else 'visible characters'}: quote some"
        )
    return target


def normalize(text: str, alphanumeric: bool = False) -> str:
    """Without white space, lower case, composed (NFC); letters and digits only if `alphanumeric`."""
    text = unicodedata.normalize("NFC", "".join(text.split()).lower())
    return "".join(filter(str.isalnum, text)) if alphanumeric else text


def text_distance(text: str, target: str) -> int:
    """0 if `target` is contained in `text`, else their Levenshtein distance, at most len(target). Both normalized."""
    if target in text:
        return 0
    return min(Levenshtein.distance(text, target, score_cutoff=len(target)), len(target))
