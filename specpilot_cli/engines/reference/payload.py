"""The body of `POST /generate`, in SGLang's shape, checked field by field.

Everything this engine would have to ignore or approximate is refused by name: sampling above
temperature 0, stop strings, penalties, constrained output. A field SGLang does not know is refused
too, because a misspelt option would otherwise change a measurement in silence.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specpilot_cli.engines.reference.decode import Job
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine

_T = TypeVar("_T")
TokenIds = list[int]
NonNegative = Annotated[int, Field(ge=0)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
# An id is a key here and a line in logs and journals of clients.
RequestId = Annotated[str, Field(min_length=1, max_length=256)]

MAX_TOP_LOGPROBS = 1000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingParams(_Strict):
    """Greedy decoding only: each field either acts here or must hold its neutral value."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    max_new_tokens: NonNegative | None = 128
    ignore_eos: bool = False
    stop_token_ids: list[NonNegative] | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    # with temperature 0 these cannot matter
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    n: Literal[1] = 1
    min_new_tokens: Literal[0] = 0
    frequency_penalty: Zero = 0.0
    presence_penalty: Zero = 0.0
    repetition_penalty: One = 1.0
    stop: Annotated[list[str], Field(max_length=0)] | Literal[""] | None = None
    stop_regex: None = None
    json_schema: None = None
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    logit_bias: None = None


class GeneratePayload(_Strict):
    """One request, or several when `text` or `input_ids` is a list of prompts."""

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: SamplingParams | list[SamplingParams] = SamplingParams()
    rid: RequestId | list[RequestId] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    log_metrics: bool = True
    extra_key: str | None = None
    custom_labels: dict[str, str] | None = None
    token_ids_logprob: None = None
    return_hidden_states: Literal[False] = False
    return_flat_raw_top_logprobs: Literal[False] = False


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a request: the engine's job, and how its reply is to look."""

    job: Job
    return_logprob: bool
    text_in_logprobs: bool
    return_prompt_ids: bool
    skip_special_tokens: bool
    trim_stop: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A checked `/generate` call. `single` tells one object from a list of one."""

    items: tuple[Item, ...]
    single: bool
    stream: bool


def parse_call(raw: Any, engine: ReferenceEngine) -> Call:
    """Check a decoded JSON body and turn it into jobs. Raises `InputError` with the reason."""
    if not isinstance(raw, dict):
        raise InputError(f"expected a JSON object, got {type(raw).__name__}")
    try:
        payload = GeneratePayload.model_validate(raw)
    except ValidationError as error:
        raise InputError(_explain(error)) from error
    prompts, single = _prompts(payload)
    count = len(prompts)
    params = _spread("sampling_params", payload.sampling_params, count)
    rids = _rids(payload.rid, count)
    logprob = _spread("return_logprob", payload.return_logprob, count)
    starts = _spread("logprob_start_len", payload.logprob_start_len, count)
    tops = _spread("top_logprobs_num", payload.top_logprobs_num, count)
    items = tuple(
        _item(engine, payload, rids[i], prompts[i], params[i] or SamplingParams(),
              logprob[i] or False, -1 if (start := starts[i]) is None else start, tops[i] or 0)
        for i in range(count)
    )  # fmt: skip
    return Call(items, single=single, stream=payload.stream)


def _item(
    engine: ReferenceEngine,
    payload: GeneratePayload,
    rid: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    return_logprob: bool,
    start: int,
    top: int,
) -> Item:
    _refuse_sampling(params)
    ids = engine.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    room = max(engine.context_length - len(ids), 0)
    max_new_tokens = room if params.max_new_tokens is None else params.max_new_tokens
    engine.check_ids(ids, max_new_tokens)
    if not -1 <= start <= len(ids):
        raise InputError(
            f"logprob_start_len {start} is higher than the number of input tokens {len(ids)}, "
            "or below -1"
        )
    if not 0 <= top <= min(MAX_TOP_LOGPROBS, engine.vocab_size):
        raise InputError(f"top_logprobs_num must be between 0 and {MAX_TOP_LOGPROBS}, got {top}")
    stop_ids = frozenset(params.stop_token_ids or ())
    job = Job(
        request_id=rid,
        input_ids=ids,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | engine.eos_ids,
        logprob_start=(len(ids) if start == -1 else start) if return_logprob else None,
        top_logprobs=top if return_logprob else 0,
    )
    return Item(
        job=job,
        return_logprob=return_logprob,
        text_in_logprobs=payload.return_text_in_logprobs,
        return_prompt_ids=payload.return_prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        trim_stop=not params.no_stop_trim,
    )


def _refuse_sampling(params: SamplingParams) -> None:
    if params.temperature != 0 and params.top_k != 1:
        raise InputError(
            f"temperature must be 0, got {params.temperature:g}: this engine decodes greedily "
            "(the API's default is 1, so send sampling_params.temperature = 0)"
        )


def _prompts(payload: GeneratePayload) -> tuple[list[str | Sequence[int]], bool]:
    """The prompts and whether there is just one, given outside a list."""
    text, ids = payload.text, payload.input_ids
    if (text is None) == (ids is None):
        raise InputError("either text or input_ids should be provided, and not both")
    if isinstance(text, str):
        return [text], True
    if text is not None:
        prompts: list[str | Sequence[int]] = list(text)
    elif ids and isinstance(ids[0], list):
        prompts = [prompt for prompt in ids if isinstance(prompt, list)]
    else:
        return [[token for token in ids or [] if isinstance(token, int)]], True
    if not prompts:
        raise InputError("the list of prompts is empty")
    return prompts, False


def _spread(name: str, value: _T | list[_T] | None, count: int) -> list[_T | None]:
    """One value per prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InputError(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{index}" for index in range(count)]
    if len(rid) != count:
        raise InputError(f"rid has {len(rid)} entries for {count} prompts")
    if len(set(rid)) != count:
        raise InputError("rid holds the same id twice")
    return rid


def _explain(error: ValidationError) -> str:
    """The first few problems, each with the key it belongs to."""
    problems = [
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)
    ]
    return "; ".join(problems[:4])
