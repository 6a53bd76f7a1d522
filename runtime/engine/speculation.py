"""Guesses of the next tokens, verified in the same step by the model itself.

A guess costs rows of a step and never changes what comes out: each row is sampled as it would have been without guesses
(seed and position decide, not the step), and the first token that differs from its guess ends the agreement.
"""

from __future__ import annotations

from array import array

__all__ = ["guess_from_context"]

#: Longest and shortest run of tokens that is looked for in the context.
_LONGEST, _SHORTEST = 4, 2


def guess_from_context(tokens: array[int], limit: int) -> array[int]:
    """`limit` tokens that continue as after the latest earlier occurrence of the newest tokens; empty without one.

    Prompt lookup: what is quoted, repeated or rewritten is likely to go on as before. Where that place reaches the end
    of the context the guess goes round: a loop is guessed to go on.
    """
    count, width = len(tokens), tokens.itemsize
    data = tokens.tobytes()
    for length in range(min(_LONGEST, count - 1), _SHORTEST - 1, -1):
        newest = data[-length * width :]
        at = data.rfind(newest, 0, len(data) - width)
        while at >= 0 and at % width:  # bytes of two tokens may look like one
            at = data.rfind(newest, 0, at + len(newest) - 1)
        if at >= 0:
            cycle = tokens[at // width + length :]
            return (cycle * (limit // len(cycle) + 1))[:limit] if len(cycle) < limit else cycle[:limit]
    return array("i")
