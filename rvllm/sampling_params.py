"""SamplingParams: how the next token is chosen and when a request ends. Checked once, then never changed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NoReturn

from rvllm.structured_output import StructuredOutput

GREEDY_BELOW = 1e-5  # a lower temperature would overflow logits / temperature in float32
MAX_N = 1024
MAX_SEED = 2**64 - 1
MAX_MIN_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 1e6  # all but uniform; logits / 1e300 would be NaN in the sampler
MAX_STOP_STRINGS = 64  # each is searched for at each step
MAX_STOP_CHARACTERS = 65_536  # of all stop strings


def _shown(value: object) -> str:
    """The value for a message: Python refuses to print integers of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _check_real(name: str, value: object, low: float, high: float, low_excluded: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf  # whatever its sign: refused
    too_low = number <= low if low_excluded else number < low
    if not math.isfinite(number) or too_low or number > high:
        left = "(" if low_excluded else "["
        right = ")" if high == math.inf else "]"
        raise ValueError(f"{name} must be in {left}{low:g}, {high:g}{right}, got {_shown(value)}")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {limit}, got {_shown(value)}")


class _ReadOnlyDict(dict[int, float]):
    """Prints, compares, copies and pickles as a dict."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("logit_bias cannot be changed: make new SamplingParams, with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[int, float]]]:
        return _ReadOnlyDict, (dict(self),)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, with vLLM's names, meanings and defaults.

    n: choices for one prompt; choice k samples from stream k of the seed.
    temperature: 0 (or anything below 1e-5) is greedy: the best token, after penalties and bias. At most 1e6.
    top_k: 0 or -1 keeps the whole vocabulary. top_p, min_p: the best token is always kept.
    seed: None or -1: derived from the engine's seed.
    stop: strings that end the text; the text is cut before them unless include_stop_str_in_output.
        At most 64, of 65,536 characters together.
    max_tokens: None runs to the end of the context; 0 generates nothing, for the log probabilities of a prompt.
    min_tokens: until then end-of-generation and stop tokens are banned and stop strings are not searched.
    logit_bias: token id -> addend in [-100, 100].
    logprobs: None for none, else how many alternatives beside the sampled token. Always natural logarithms
        of the model's own distribution, before temperature, penalties and bias.
    prompt_logprobs: likewise for each token of the prompt but the first, which is then computed as a whole.
    cache_prompt: False computes the whole prompt, though its prefix may be cached: slower, to the same answer.
    structured_output: what the answer must be; where it is complete the request ends with "stop", whatever
        min_tokens and ignore_eos say.

    Lists become tuples, and logit_bias a dict that cannot be changed. Raises ValueError naming field, value and limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    cache_prompt: bool = True
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_real("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _check_real("top_p", self.top_p, 0, 1)
        _check_int("top_k", self.top_k, -1)
        _check_real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
        most = MAX_MIN_TOKENS if self.max_tokens is None else min(self.max_tokens, MAX_MIN_TOKENS)
        _check_int("min_tokens", self.min_tokens, 0, most)
        _check_real("presence_penalty", self.presence_penalty, -2, 2)
        _check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_real("repetition_penalty", self.repetition_penalty, 0, math.inf, low_excluded=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "cache_prompt"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise ValueError(
                f"structured_output must be a StructuredOutput, got {self.structured_output!r:.100}"
            )
        self._check_stop()
        self._check_token_ids()
        for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:  # NumPy's would overflow
                object.__setattr__(self, name, int(getattr(self, name)))
        for name, plain, frozen in (
            ("stop", list, tuple),
            ("stop_token_ids", list, tuple),
            ("logit_bias", dict, _ReadOnlyDict),
        ):
            if isinstance(getattr(self, name), plain):
                object.__setattr__(self, name, frozen(getattr(self, name)))

    def _check_stop(self) -> None:
        if self.stop is not None and not isinstance(self.stop, (str, list, tuple)):
            raise ValueError(f"stop must be a string or a list of strings, got {self.stop!r}")
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise ValueError(f"stop must be a string or a list of strings, got {text!r} in it")
            if not text:
                raise ValueError("stop must not hold an empty string: it would match everywhere")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(
                f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop_strings)}"
            )
        size = sum(map(len, self.stop_strings))
        if size > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop must hold at most {MAX_STOP_CHARACTERS} characters altogether, got {size}"
            )
        for text in self.stop_strings:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(
                    f"stop must hold text, got {text!r} with half a surrogate pair: no answer has one"
                )

    def _check_token_ids(self) -> None:
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, (list, tuple)):
                raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
            for token_id in self.stop_token_ids:
                _check_int("stop_token_ids", token_id, 0)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            for token_id, bias in self.logit_bias.items():
                _check_int("logit_bias key", token_id, 0)
                _check_real(f"logit_bias[{token_id}]", bias, -100, 100)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
