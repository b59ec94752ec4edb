"""Values of a server's reply, each checked before anything rests on it.

Nothing is repaired: what is missing, not finite or out of range raises MeasurementInvalid with the
request's name, and what a message shows of a reply is cut short.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, Final

from specpilot_cli.engines.base import TokenLogprob
from specpilot_cli.errors import MachineError, MeasurementInvalid

JsonObject = dict[str, Any]

LOGPROB_SLACK_NATS: Final = 1e-4
"""A log-softmax in float32 may land this far above 0, or a token this far above the top list."""

# Vocabularies and counts are far smaller; what is larger would not fit the arrays it goes into.
_MOST = 2**31
# Of a server's description. Real ones have five or six levels, and deeper ones break recursion.
_MOST_LEVELS = 64

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_LONGEST_MESSAGE = 200


def invalid(request_id: str, reason: str) -> MeasurementInvalid:
    """Build the error that ends a measurement because of one reply."""
    return MeasurementInvalid(
        reason,
        hint="one bad reply voids the run: look at the server's log, then measure again",
        where=f"request `{request_id}`",
    )


def without_ids(request_id: str, what: str) -> MachineError:
    """Build the error for a server whose replies hold no token ids: text is never re-tokenised."""
    return MachineError(
        f"the server reports no token ids {what}",
        where=f"request `{request_id}`",
        hint="several id sequences spell the same text, so ids must come from the server: SGLang's "
        "/generate reports them",
    )


def decode_json(raw: bytes, request_id: str) -> JsonObject:
    """Parse one reply; MeasurementInvalid when it is no JSON object."""
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:  # covers UnicodeDecodeError
        start = raw[:120].decode("utf-8", "replace")
        raise invalid(request_id, f"the reply is not JSON: `{start}`") from error
    if not isinstance(parsed, dict):
        raise invalid(request_id, f"the reply is a JSON {type(parsed).__name__}, not an object")
    if "error" in parsed:
        error_value = parsed["error"]
        message = error_value.get("message") if isinstance(error_value, dict) else error_value
        raise invalid(request_id, f"the server reported an error: {_message(message)}")
    return parsed


def decode_description(raw: bytes, request_id: str) -> JsonObject:
    """Parse what a server says of itself; MeasurementInvalid also for more than 64 levels."""
    found = decode_json(raw, request_id)
    level: list[Any] = [found]
    for _ in range(_MOST_LEVELS):
        holders = [value for value in level if isinstance(value, dict | list)]
        inner = [v.values() if isinstance(v, dict) else v for v in holders]
        level = [item for items in inner for item in items]
        if not level:
            return found
    raise invalid(request_id, f"the reply is nested over {_MOST_LEVELS} levels deep")


def is_token_id(value: Any) -> bool:
    """Whether a JSON value can be a token id: a whole number from 0 to 2**31 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def meta_of(reply: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
    """The reply's `meta_info`."""
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise invalid(request_id, "the reply has no `meta_info`")
    return meta


def token_ids(value: Any, key: str, request_id: str) -> tuple[int, ...]:
    """The token ids that the reply holds under `key`."""
    if not isinstance(value, list):
        raise invalid(request_id, f"the reply has no list `{key}`")
    for token in value:
        if not is_token_id(token):
            raise invalid(request_id, f"`{key}` holds `{shown(token)}`, which is no token id")
    return tuple(value)


def count(meta: Mapping[str, Any], key: str, request_id: str) -> int:
    """A number of tokens or steps."""
    value = meta.get(key)
    if not isinstance(value, int) or not is_token_id(value):  # the same range
        raise invalid(request_id, f"`meta_info.{key}` is `{shown(value)}`, not a count")
    return value


def check_most(n_tokens: int, most: int, request_id: str) -> None:
    """Refuse more tokens than were asked for."""
    if n_tokens > most:
        raise invalid(request_id, f"{n_tokens} tokens where {most} were asked for")


def optional_count(meta: Mapping[str, Any], key: str, request_id: str) -> int | None:
    """A count that a server need not report."""
    return None if meta.get(key) is None else count(meta, key, request_id)


def finish_type(meta: Mapping[str, Any], request_id: str) -> str:
    """Why generation ended: `stop` or `length`; anything else voids the measurement."""
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind in ("stop", "length"):
        return str(kind)
    if kind == "abort":
        message = reason.get("message", "no message") if isinstance(reason, dict) else "no message"
        raise invalid(request_id, f"the server aborted it: {_message(message)}")
    raise invalid(request_id, f"the answer ended with finish reason `{shown(kind)}`")


def shown(value: Any) -> str:
    """A value of a reply for a message: one that is long or deep is cut."""
    return _SHOWN.repr(value)


def _message(value: Any) -> str:
    return value[:_LONGEST_MESSAGE] if isinstance(value, str) else shown(value)


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except (TypeError, OverflowError):  # no number, or a whole one beyond every float
        return False


def logprob(value: Any, request_id: str) -> float:
    """A log-probability in nats: finite, and not above zero but for rounding."""
    if not _is_finite(value):
        raise invalid(request_id, f"a log-probability is `{shown(value)}`")
    if value > LOGPROB_SLACK_NATS:
        raise invalid(request_id, f"a log-probability is {value}, above zero")
    return float(value)


def pair(row: Any, request_id: str) -> TokenLogprob:
    """One row `[log-probability, token id, ...]`."""
    if not isinstance(row, list) or len(row) < 2:
        raise invalid(request_id, f"a log-probability row is `{shown(row)}`")
    value, token = row[0], row[1]
    if not is_token_id(token):
        raise invalid(request_id, f"a log-probability row names token `{shown(token)}`")
    return TokenLogprob(token, logprob(value, request_id))
