"""SamplingParams refuses every bad value by name, and accepts every edge that users rely on."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from rvllm.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", v) for v in (0, -1, 1025, True, 1.0, "2", None)],
        *[
            ("temperature", v)
            for v in (-0.1, NAN, INF, -INF, 1.1e6, 1e300, 10**400, -(10**400), True, "0.5", None)
        ],
        *[("top_p", v) for v in (-0.1, 1.0001, NAN, "0.9", None, False)],
        *[("top_k", v) for v in (-2, -5, 1.5, "3", None, True)],
        *[("min_p", v) for v in (-0.1, 1.1, NAN)],
        *[("seed", v) for v in (2**64, -(2**63) - 1, 1.5, "1", True)],
        *[("max_tokens", v) for v in (-1, 1.0, "16", True)],
        *[("min_tokens", v) for v in (-1, 17, 0.5, None)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, None)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN)],
        *[("repetition_penalty", v) for v in (0, -1, NAN, INF)],
        *[("logprobs", v) for v in (-1, 1.0, True, "1")],
        *[
            ("stop", v)
            for v in (
                "",
                [""],
                ["", "x"],
                [1],
                {"a": 1},
                1,
                [None],
                b"x",
                ["x"] * 65,
                "x" * 65_537,
                ["x" * 32_769] * 2,
            )
        ],
        *[("stop_token_ids", v) for v in (3, [-1], ["a"], [1.5], [True], {1})],
        *[("include_stop_str_in_output", v) for v in (1, None, "yes")],
        *[("ignore_eos", v) for v in (1, None)],
        *[("skip_special_tokens", v) for v in (0, None)],
        *[
            ("logit_bias", v)
            for v in ([], "x", {"33": 1}, {-1: 1}, {33: 1e9}, {33: None}, {33: NAN}, {True: 1})
        ],
    ],
)
def test_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


def test_numbers_of_numpy_become_pythons() -> None:
    params = SamplingParams(seed=np.int64(5), max_tokens=np.int32(2**31 - 1), n=np.int8(2))  # type: ignore[arg-type]
    assert [type(value) for value in (params.seed, params.max_tokens, params.n)] == [int] * 3
    assert params == SamplingParams(seed=5, max_tokens=2**31 - 1, n=2)
    with pytest.raises(ValueError, match=r"min_tokens must be in \[0, 2147483647\], got 8589934592"):
        SamplingParams(max_tokens=2**40, min_tokens=2**33)


def test_message_names_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"^top_p must be in \[0, 1\], got 1\.5$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"^repetition_penalty must be in \(0, inf\), got 0$"):
        SamplingParams(repetition_penalty=0)
    with pytest.raises(ValueError, match=r"^min_tokens must be in \[0, 4\], got 5$"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(ValueError, match=r"^max_tokens must be at least 0, got -1$"):
        SamplingParams(max_tokens=-1)


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 5e-324, 1e-300, 1e-40, 1e-8, 9.9e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy


@pytest.mark.parametrize("temperature", [1e-5, 0.2, 1, 2.0, 100.0])
def test_other_temperatures_sample(temperature: float) -> None:
    assert not SamplingParams(temperature=temperature).is_greedy


def test_edges_are_accepted() -> None:
    SamplingParams(top_p=0)
    SamplingParams(top_p=1)
    for top_k in (0, -1, 1, 49152, 10**9):
        SamplingParams(top_k=top_k)
    for seed in (-1, 0, 2**64 - 1, None):
        SamplingParams(seed=seed)
    SamplingParams(max_tokens=None, min_tokens=10**6)
    SamplingParams(max_tokens=0)
    SamplingParams(logit_bias={0: -100, 5: 100.0})
    SamplingParams(logprobs=0)
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3))


def test_messages_name_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"^temperature must be in \[0, 1e\+06\], got 2000000.0$"):
        SamplingParams(temperature=2e6)
    with pytest.raises(ValueError, match=r"^temperature must be .* got an integer of 33220 bits$"):
        SamplingParams(temperature=10**10_000)
    with pytest.raises(ValueError, match=r"^max_tokens must be at least 0, got an integer of 33220 bits$"):
        SamplingParams(max_tokens=-(10**10_000))
    with pytest.raises(ValueError, match=r"^stop must hold at most 64 strings, got 65$"):
        SamplingParams(stop=["x"] * 65)
    with pytest.raises(ValueError, match=r"^stop must hold at most 65536 characters altogether, got 70000$"):
        SamplingParams(stop=["x" * 35_000] * 2)
    assert len(SamplingParams(stop=["x" * 1024] * 64).stop_strings) == 64
    with pytest.raises(ValueError, match=r"^stop must hold text, got .* half a surrogate pair"):
        SamplingParams(stop=["a", "b\udcff"])


def test_stop_strings() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop=[]).stop_strings == ()
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["a", "b", "c", "d", "e"]).stop_strings == ("a", "b", "c", "d", "e")
    assert SamplingParams(stop=(" ", "\n", "z" * 10_000)).stop_strings[2] == "z" * 10_000


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_what_it_holds_is_frozen_too() -> None:
    stop, ids, bias = ["a"], [1, 2], {3: 4.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(3)
    bias[5] = 6.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1, 2), {3: 4.0})
    assert params.logit_bias is not None
    for change in (
        lambda held: held.__setitem__(5, 6.0),
        lambda held: held.pop(3),
        lambda held: held.update({5: 6.0}),
        lambda held: held.clear(),
        lambda held: held.setdefault(5, 6.0),
    ):
        with pytest.raises(TypeError, match="logit_bias cannot be changed"):
            change(params.logit_bias)
    for copied in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
        SamplingParams(**dataclasses.asdict(params)),
    ):
        assert copied == params
        with pytest.raises(TypeError):
            copied.logit_bias[5] = 6.0  # type: ignore[index]
