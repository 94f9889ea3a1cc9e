"""The reference itself: operations by identities, rounding by exact fractions, logits by another program's."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import reference
from gguf import GGMLQuantizationType as GGMLType
from hypothesis import given
from hypothesis import strategies as st
from quant_reference import CODE_TYPES, FLOAT_TYPES
from random_weights import BLOCK_FIELDS, random_weights
from tiny_gguf import CONTROL_TOKENS, FAMILIES, write_tiny_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
PROMPT = list(b"The quick brown fox")
by_name = pytest.mark.parametrize("kind", CODE_TYPES, ids=lambda kind: kind.name)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to an exact value, the even one of two."""
    guess = np.float32(float(value))
    candidates = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.uint32)) & 1))


def fraction(value: Any) -> Fraction:
    return Fraction(float(value))


# Rounding


@given(st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=3, max_size=3))
def test_fma_rounds_once(values: list[float]) -> None:
    a, b, c = (np.float32(value) for value in values)
    assert reference.fma(a, b, c) == nearest_float32(fraction(a) * fraction(b) + fraction(c))


def test_fma_rounds_once_where_terms_nearly_cancel() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(2000).astype(np.float32) for _ in range(2))
    scale = np.where(rng.random(2000) < 0.5, 1.0, 2.0 ** rng.integers(-30, 30, 2000))
    c = (-a.astype(np.float64) * b * scale).astype(np.float32)
    out = reference.fma(a, b, c)
    assert out.dtype == np.float32
    for i in range(2000):
        assert out[i] == nearest_float32(fraction(a[i]) * fraction(b[i]) + fraction(c[i]))


@pytest.mark.parametrize("sign", [1, -1])
def test_fma_is_right_where_float64_would_round_to_a_tie(sign: int) -> None:
    a = np.float32(1 + 2**-12)  # a * a = 1 + 2^-11 + 2^-24 lies half-way between two float32
    for c, expected in ((2.0**-80, 1 + 2**-11 + 2**-23), (0.0, 1 + 2**-11), (-(2.0**-80), 1 + 2**-11)):
        assert reference.fma(sign * a, a, np.float32(sign * c)) == np.float32(sign * expected)
    assert np.float32(float(a) * float(a) + 2.0**-80) != np.float32(1 + 2**-11 + 2**-23)


def test_fma_of_what_float32_cannot_hold() -> None:
    tiny, huge, one = np.float32(1e-30), np.float32(3e38), np.float32(1)
    assert reference.fma(tiny, tiny, one) == 1
    assert reference.fma(tiny, tiny, np.float32(0)) == 0
    assert reference.fma(huge, huge, one) == np.inf
    assert np.isnan(reference.fma(np.float32(np.inf), np.float32(0), one))
    subnormal = np.float32(2.0**-149)
    assert reference.fma(subnormal, np.float32(0.5), subnormal) == np.float32(2.0**-148)  # 1.5 steps, to even


# Quantized products


@by_name
def test_codes_give_the_weights_of_gguf(kind: GGMLType) -> None:
    data = random_weights(kind, 24, 512, 0.1, np.random.default_rng(1))
    weights = reference.decode(data.tobytes(), kind, 24, 512).weights()
    np.testing.assert_array_equal(weights, gguf.quants.dequantize(data, kind))


@by_name
def test_codes_and_sums_stay_exact_in_float32(kind: GGMLType) -> None:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    for byte in (0x00, 0x80, 0xFF):
        codes = reference.decode(np.full(size, byte, np.uint8), kind, 1, gguf.GGML_QUANT_SIZES[kind][0])
        worst = 127 * np.abs(codes.q.reshape(-1, 16)).sum(axis=1) * np.abs(codes.scale.ravel())
        assert worst.reshape(-1, 2).sum(axis=1).max() < 2**24


@by_name
def test_linear_int8_rounds_as_written(kind: GGMLType) -> None:
    n, k = 3, 256
    weight = random_weights(kind, n, k, 1.0, np.random.default_rng(2)).tobytes()
    x = normal(1, k, seed=2).astype(np.float32)
    codes = reference.decode(weight, kind, n, k)
    (a,), (s,) = reference.quantize_activations(x)
    for row, out in enumerate(reference.linear_int8(weight, kind, n, k, x)[0]):
        total = np.float32(0)
        for block in range(k // 32):
            at = range(32 * block, 32 * block + 32)
            dot = sum(int(codes.scale[row, i // 16]) * int(codes.q[row, i]) * int(a[i]) for i in at)
            factor = nearest_float32(fraction(codes.d[row, block]) * fraction(s[block]))
            total = nearest_float32(fraction(total) + dot * fraction(factor))
            if codes.m is not None:
                dot = sum(int(codes.min[row, i // 16]) * int(a[i]) for i in at)
                factor = nearest_float32(fraction(s[block]) * dot)
                total = nearest_float32(fraction(total) + fraction(codes.m[row, block]) * fraction(factor))
        assert out == total


@pytest.mark.parametrize("kind", FLOAT_TYPES, ids=lambda kind: kind.name)
def test_linear_of_float_weights_adds_in_order(kind: GGMLType) -> None:
    weight = random_weights(kind, 2, 40, 1.0, np.random.default_rng(3))
    x = normal(1, 40, seed=3).astype(np.float32)
    w = gguf.quants.dequantize(weight, kind)
    for row, out in enumerate(reference.linear_int8(weight.tobytes(), kind, 2, 40, x)[0]):
        total = np.float32(0)
        for i in range(40):
            total = nearest_float32(fraction(w[row, i]) * fraction(x[0, i]) + fraction(total))
        assert out == total


@by_name
def test_linear_int8_is_close_and_each_row_alone(kind: GGMLType) -> None:
    n, k = 40, 512
    weight = random_weights(kind, n, k, k**-0.5, np.random.default_rng(4)).tobytes()
    x = normal(5, k, seed=4).astype(np.float32)
    out = reference.linear_int8(weight, kind, n, k, x)
    np.testing.assert_allclose(out, reference.linear(x, reference.dequantize(weight, kind, n, k)), atol=0.04)
    np.testing.assert_array_equal(reference.linear_int8(weight, kind, n, k, x[3:4])[0], out[3])


def test_activations_are_quantized_to_the_nearest_code() -> None:
    x = np.concatenate([np.linspace(-1, 1, 32), np.zeros(32), np.full(32, 1e-35), np.full(32, -3.0)])[None]
    codes, scales = reference.quantize_activations(x.astype(np.float32))
    assert codes[0, 0] == -127 and codes[0, 31] == 127
    assert np.abs(codes * np.repeat(scales, 32, axis=1) - x).max() <= 0.5 / 127 + 1e-7
    assert not codes[0, 32:96].any() and (codes[0, 96:] == -127).all()


@pytest.mark.parametrize("kind", [*FLOAT_TYPES, *BLOCK_FIELDS], ids=lambda kind: kind.name)
def test_random_weights_have_the_spread_asked_for(kind: GGMLType) -> None:
    data = random_weights(kind, 64, 512, 0.02, np.random.default_rng(5))
    weights = gguf.quants.dequantize(data, kind)
    assert abs(weights.mean()) < 0.002
    assert 0.018 < np.sqrt((weights**2).mean()) < 0.023
    np.testing.assert_array_equal(data, random_weights(kind, 64, 512, 0.02, np.random.default_rng(5)))


def test_random_weights_refuse_half_a_block() -> None:
    with pytest.raises(ValueError, match="K = 128 is no multiple of 256, the block of Q4_K"):
        random_weights(GGMLType.Q4_K, 1, 128, 1.0, np.random.default_rng(0))


# Operations


def test_rms_norm_has_unit_mean_square_and_no_scale() -> None:
    x = normal(3, 50)
    out = reference.rms_norm(x, np.ones(50), 0.0)
    np.testing.assert_allclose((out**2).mean(axis=1), 1)
    np.testing.assert_allclose(reference.rms_norm(1e3 * x, np.ones(50), 0.0), out)


def test_layer_norm_has_no_mean_and_unit_variance() -> None:
    x = normal(3, 50) + 7
    out = reference.layer_norm(x, np.ones(50), 0.0)
    np.testing.assert_allclose(out.mean(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(out.std(axis=1), 1)
    np.testing.assert_allclose(reference.layer_norm(5 * x + 3, np.ones(50), 0.0), out)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_depends_on_distance_alone(interleaved: bool) -> None:
    frequencies = reference.rope_frequencies(8, 10_000.0)
    q, k = normal(2, 12, 1, 10)

    def rotate(x: np.ndarray, start: int) -> np.ndarray:
        return reference.rope(x, np.arange(start, start + 12), frequencies, interleaved)[:, 0]

    np.testing.assert_allclose(rotate(q, 0) @ rotate(k, 0).T, rotate(q, 77) @ rotate(k, 77).T)
    np.testing.assert_array_equal(rotate(q, 0)[0], q[0, 0])
    np.testing.assert_array_equal(rotate(q, 5)[:, 8:], q[:, 0, 8:])  # beyond dim
    assert not np.allclose(rotate(q, 0) @ rotate(k, 0).T, rotate(q, 0) @ rotate(k, 1).T)


def test_rope_orders_are_permutations_of_each_other() -> None:
    x, order = normal(6, 2, 8), np.arange(8).reshape(4, 2).T.ravel()  # 0 2 4 6 1 3 5 7
    frequencies, positions = reference.rope_frequencies(8, 100.0), np.arange(6)
    interleaved = reference.rope(x, positions, frequencies, interleaved=True)
    np.testing.assert_allclose(
        reference.rope(x[..., order], positions, frequencies, False), interleaved[..., order]
    )


def test_rope_frequencies() -> None:
    np.testing.assert_allclose(reference.rope_frequencies(4, 100.0), [1, 0.1])
    np.testing.assert_allclose(reference.rope_frequencies(4, 100.0, 8.0), [1 / 8, 0.1 / 8])
    np.testing.assert_allclose(reference.rope_frequencies(4, 100.0, 1.0, np.array([1, 4])), [1, 0.025])


def test_yarn_stretches_slow_frequencies_only() -> None:
    plain, factor, context = reference.rope_frequencies(64, 1e4), 8.0, 4096
    ratio = reference.yarn_frequencies(64, 1e4, factor, context) / plain
    turns = context * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 34], 1)
    np.testing.assert_allclose(ratio[turns < 0.7], 1 / factor)
    assert ((turns[1:] > 34) | (turns[1:] < 0.7) | (np.diff(ratio) < 0)).all()
    np.testing.assert_allclose(reference.yarn_frequencies(64, 1e4, 1.0, context), plain)


def test_attention_to_equal_keys_is_a_mean() -> None:
    v = normal(6, 2, 4)
    out = reference.attention(normal(6, 4, 4, seed=1), np.ones((6, 2, 4)), v, 0.5)
    for t in range(6):
        np.testing.assert_allclose(out[t, 0], v[: t + 1, 0].mean(axis=0))
        np.testing.assert_allclose(out[t, 3], v[: t + 1, 1].mean(axis=0))  # heads 2 and 3 read KV head 1
    out = reference.attention(normal(6, 4, 4, seed=1), np.ones((6, 2, 4)), v, 0.5, window=2)
    np.testing.assert_allclose(out[5, 0], v[4:6, 0].mean(axis=0))


def test_attention_of_the_last_tokens_alone() -> None:
    q, k, v = normal(9, 4, 8), normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    for window in (0, 3):
        whole = reference.attention(q, k, v, 0.3, window)
        np.testing.assert_allclose(reference.attention(q[6:], k, v, 0.3, window), whole[6:])


def test_attention_scores_by_hand() -> None:
    q, k, v = np.full((1, 1, 1), 2.0), np.array([[[1.0]], [[3.0]]]), np.array([[[10.0]], [[20.0]]])
    for soft_cap in (0.0, 1.5):
        scores = [0.5 * 2 * 1, 0.5 * 2 * 3]
        if soft_cap:
            scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
        a, b = (math.exp(score) for score in scores)
        expected = (10 * a + 20 * b) / (a + b)
        np.testing.assert_allclose(reference.attention(q, k, v, 0.5, soft_cap=soft_cap), [[[expected]]])


def test_a_sink_takes_part_of_the_weight_and_adds_nothing() -> None:
    q, k, v = normal(5, 2, 4), normal(5, 2, 4, seed=1), normal(5, 2, 4, seed=2)
    plain = reference.attention(q, k, v, 0.5)
    np.testing.assert_allclose(reference.attention(q, k, v, 0.5, sinks=np.full(2, -1e3)), plain)
    out = reference.attention(q, k, v, 0.5, sinks=np.array([0.7, -1e3]))
    for t in range(5):
        others = np.exp(0.5 * k[: t + 1, 0] @ q[t, 0]).sum()
        np.testing.assert_allclose(out[t, 0], plain[t, 0] * others / (others + math.exp(0.7)))
    np.testing.assert_allclose(out[:, 1], plain[:, 1])


def test_activations_by_hand() -> None:
    for gate, up in ((-3.0, 0.5), (0.0, 2.0), (2.0, -9.0), (11.0, 8.0)):
        bounded, other = min(gate, 7), max(-7, min(7, up))
        expected = bounded / (1 + math.exp(-1.702 * bounded)) * (other + 1)
        assert reference.swiglu_oai(np.array(gate), np.array(up)) == pytest.approx(expected)
    for x in (-3.0, -0.5, 0.0, 0.7, 4.0):
        assert reference.silu(np.array(x)) == pytest.approx(x / (1 + math.exp(-x)))
        # The exact gelu, which the tanh form follows within 5e-4.
        assert reference.gelu(np.array(x)) == pytest.approx(
            0.5 * x * (1 + math.erf(x / math.sqrt(2))), abs=5e-4
        )


def test_linear_adds_a_bias() -> None:
    np.testing.assert_allclose(reference.linear([[1, 2]], [[3, 4], [5, 6]], np.array([1, 0])), [[12, 17]])


# The transformer


# Best token after each token of PROMPT, and the first logits after the last: made by an independent implementation.
OTHER_LOGITS: dict[str, tuple[dict[str, Any], list[int], list[float]]] = {
    "llama": (
        {"rope_freqs": [1, 1, 2, 4, 8, 8, 8, 8]},
        [68, 216, 68, 183, 135, 68, 246, 21, 194, 231, 210, 189, 83, 28, 249, 196, 194, 58, 48],
        [4.9995, 4.489, 1.0183, 2.2347, 5.2941, -1.2281],
    ),
    "qwen2": (
        {"arch": "qwen2", "tied": False, "heads": 8, "kv_heads": 1},
        [2, 83, 83, 83, 196, 165, 193, 254, 15, 196, 75, 149, 83, 142, 83, 196, 110, 142, 174],
        [0.1023, -4.4467, -4.1089, -0.2939, -11.6899, 0.0213],
    ),
    "gemma3": (
        {
            "arch": "gemma3",
            "layers": 7,
            "head_dim": 32,
            "sliding_window": 5,
            "metadata": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
        },
        [174, 243, 136, 213, 252, 241, 228, 139, 115, 60, 92, 52, 61, 18, 38, 84, 144, 36, 115],
        [7.0235, 0.7859, -10.0517, -2.3196, -1.4265, -5.2828],
    ),
}


@pytest.mark.parametrize("name", OTHER_LOGITS)
def test_forward_equals_another_implementation(name: str, tmp_path: Path) -> None:
    options, best, last = OTHER_LOGITS[name]
    write_tiny_model(tmp_path / "tiny.gguf", **options)
    logits = reference.forward(tmp_path / "tiny.gguf", PROMPT)
    assert logits.argmax(axis=1).tolist() == best
    np.testing.assert_allclose(logits[-1, :6], last, atol=2e-4)


@pytest.mark.parametrize("arch", FAMILIES)
def test_forward_is_causal_and_sees_the_past(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, arch, sliding_window=8)
    logits = reference.forward(path, PROMPT)
    np.testing.assert_allclose(reference.forward(path, PROMPT[:7]), logits[:7], atol=1e-9)
    assert (
        np.abs(reference.forward(path, [PROMPT[1], *PROMPT[1:]])[1:8] - logits[1:8]).max(axis=1).min() > 1e-3
    )


def test_gemma3_layers_forget_beyond_the_window(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, "gemma3", layers=2, sliding_window=3)  # neither layer is global
    other = reference.forward(path, [0, *PROMPT[1:]])
    same = np.isclose(other, reference.forward(path, PROMPT), atol=1e-9).all(axis=1)
    assert same.tolist() == [False] * 5 + [True] * (len(PROMPT) - 5)  # each layer reaches 2 tokens back
    transformer = reference.Transformer(path)
    assert [transformer.is_local(layer) for layer in range(8)] == [True] * 5 + [False, True, True]
    write_tiny_model(
        path, "gemma3", sliding_window=3, metadata={"gemma3.attention.sliding_window_pattern": 2}
    )
    transformer = reference.Transformer(path)
    assert [transformer.is_local(layer) for layer in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("quant", ["F16", "BF16", *(kind.name for kind in CODE_TYPES)])
def test_int8_numerics_stay_near(quant: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, quant=quant)
    logits, rounded = (reference.forward(path, PROMPT[:8], int8) for int8 in (False, True))
    assert logits.std() > 2
    assert 0 < np.abs(rounded - logits).mean() < 0.2


# Tiny models


def test_tiny_models_are_the_same_bytes_again(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny_model(tmp_path / name, quant="Q5_1", seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_tiny_models_have_the_types_and_tensors_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    quant = {"*.ffn_down.*": "Q6_K", "token_embd.*": "Q8_0", "*": "Q4_K"}
    write_tiny_model(path, "gemma3", quant, tied=False, qkv_bias=True, vocab=300, context_length=64)
    reader = gguf.GGUFReader(path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.1.ffn_down.weight"] == "Q6_K"
    assert types["token_embd.weight"] == "Q8_0"
    assert types["output.weight"] == types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["blk.0.attn_v.bias"] == types["blk.1.post_ffw_norm.weight"] == "F32"
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == len(set(tokens)) == 300
    assert tokens[65:67] == ["A", "B"] and tokens[256 : 256 + len(CONTROL_TOKENS)] == [*CONTROL_TOKENS]
    assert reader.fields["gemma3.context_length"].contents() == 64


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_models_answer_with_many_tokens(arch: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf", arch)
    transformer = reference.Transformer(tmp_path / "tiny.gguf")
    ids = list(b"Hello")
    for _ in range(30):
        ids.append(int(transformer.logits(ids)[-1].argmax()))
    assert len(set(ids[5:])) > 15


def test_tiny_models_refuse_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="K = 96 is no multiple of 256, the block of Q6_K"):
        write_tiny_model(tmp_path / "tiny.gguf", quant="Q6_K", ff=96)
    with pytest.raises(ValueError, match="vocab = 200 is less than the 260 bytes and control tokens"):
        write_tiny_model(tmp_path / "tiny.gguf", vocab=200)
