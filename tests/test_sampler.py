"""The native sampler: distributions, penalties, log-probabilities, and seeds that depend on nothing else."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rvllm import _core

VOCAB = 1000
LOGITS = (np.random.default_rng(0).standard_normal(VOCAB) * 3).astype(np.float32)


def sampler(**settings: object) -> _core.Sampler:
    return _core.Sampler(**{"vocab_size": VOCAB, **settings})  # type: ignore[arg-type]


def draw(logits: NDArray[np.float32] = LOGITS, **settings: object) -> int:
    return sampler(**settings).sample(logits)[0]


def frequencies(count: int, logits: NDArray[np.float32] = LOGITS, **settings: object) -> NDArray[np.float64]:
    ids = [draw(logits, seed=seed, **settings) for seed in range(count)]
    return np.bincount(ids, minlength=len(logits)) / count


def probabilities(temperature: float = 1.0) -> NDArray[np.float64]:
    p = np.exp((LOGITS.astype(np.float64) - LOGITS.max()) / temperature)
    return p / p.sum()


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 5e-324, 1e-40, 1e-8, 9e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    for seed in range(5):
        settings = {"temperature": temperature, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": seed}
        assert draw(**settings) == LOGITS.argmax()


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[700, 37, 900]] = 5
    assert draw(logits, temperature=0.0) == 37


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_samples_follow_the_distribution(temperature: float) -> None:
    count = 20_000
    seen, expected = frequencies(count, temperature=temperature), probabilities(temperature)
    likely = expected > 1e-3
    error = np.abs(seen - expected)[likely]
    assert (error < 5 * np.sqrt(expected[likely] / count)).all()


def test_the_same_seed_gives_the_same_stream_and_others_another() -> None:
    a, b, c, d = (sampler(temperature=2.0, seed=s, index=i) for s, i in ((1, 0), (1, 0), (2, 0), (1, 1)))
    streams = [[s.sample(LOGITS)[0] for _ in range(20)] for s in (a, b, c, d)]
    assert streams[0] == streams[1]
    assert streams[0] != streams[2] and streams[0] != streams[3] and streams[2] != streams[3]
    assert len(set(streams[0])) > 5  # the position is part of the counter


def test_off_values_of_top_k_are_one() -> None:
    for seed in range(20):
        free = draw(temperature=5.0, seed=seed)
        for top_k in (0, VOCAB, 10**9):
            assert draw(temperature=5.0, seed=seed, top_k=top_k) == free
        assert draw(temperature=5.0, seed=seed, top_p=1.0) == free
        assert draw(temperature=5.0, seed=seed, top_k=1) == LOGITS.argmax()


def test_sampling_reaches_the_whole_vocabulary() -> None:
    assert len({draw(temperature=50.0, seed=seed) for seed in range(400)}) > 250


@pytest.mark.parametrize("top_k", [2, 10, 100])
def test_top_k_keeps_the_best(top_k: int) -> None:
    best = set(np.argsort(-LOGITS)[:top_k])
    drawn = {draw(temperature=10.0, seed=seed, top_k=top_k) for seed in range(300)}
    assert drawn <= best
    assert len(drawn) > min(top_k, 300) // 3


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_nucleus(top_p: float) -> None:
    p = probabilities()
    order = np.argsort(-p)
    nucleus = set(order[: np.searchsorted(np.cumsum(p[order]), top_p) + 1])
    assert {draw(seed=seed, top_p=top_p) for seed in range(500)} <= nucleus


def kept_by(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> NDArray[np.bool_]:
    """Which tokens are left: top_k of those min_p leaves, then the nucleus of what is left."""
    p = probabilities()
    kept = p >= min_p * p.max()
    order = [i for i in np.argsort(-p, kind="stable") if kept[i]][: top_k or None]
    mass = np.cumsum(p[order]) / p[order].sum()
    nucleus = order[: int(np.searchsorted(mass, top_p)) + 1]
    return np.isin(np.arange(VOCAB), nucleus)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5}, {"top_k": 40}, {"top_p": 0.6}, {"top_p": 0.9}, {"min_p": 0.02}, {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8}, {"top_k": 30, "min_p": 0.05}, {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_left_keeps_its_proportions(settings: dict[str, float]) -> None:
    """Pearson's chi-squared of 4,000 draws against the renormalized distribution; seeds make it repeatable."""
    count = 4000
    expected = np.where(kept_by(**settings), probabilities(), 0.0)  # type: ignore[arg-type]
    expected *= count / expected.sum()
    seen = frequencies(count, **settings) * count
    assert not seen[expected == 0].any()
    rare = (expected > 0) & (expected < 5)  # together in one class
    classes = [
        *zip(seen[expected >= 5], expected[expected >= 5], strict=True),
        (seen[rare].sum(), expected[rare].sum()),
    ]
    chi_squared = sum((s - e) ** 2 / e for s, e in classes if e > 0)
    freedom = len([e for _, e in classes if e > 0]) - 1
    assert freedom >= 3
    assert (
        chi_squared < freedom + 4 * np.sqrt(2 * freedom) + 6
    )  # passed by about 9,999 of 10,000 good samplers


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1e-3])
def test_top_p_near_zero_is_greedy(top_p: float) -> None:
    assert {draw(temperature=1.5, seed=seed, top_p=top_p) for seed in range(10)} == {LOGITS.argmax()}


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.2}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 0.9, "min_p": 0.01}, {"min_p": 0.05},
        {"top_k": 40}, {"top_k": 40, "top_p": 0.9}, {"top_k": 3000}, {"top_k": 3000, "top_p": 0.95},
        {"top_k": 300, "top_p": 0.5, "min_p": 0.02},
    ],
)  # fmt: skip
def test_what_is_kept_is_what_the_definitions_keep(settings: dict[str, float], spread: float) -> None:
    """Of a large vocabulary, by each way of finding a nucleus. The same seed draws at the same point of [0, 1)."""
    size = 8192
    logits = (np.random.default_rng(3).standard_normal(size) * spread).astype(np.float32)
    logits[[5, 8000]] = logits.max()  # a tie
    p = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-logits, kind="stable")
    order = order[p[order] >= settings.get("min_p", 0)][: settings.get("top_k", size)]
    sums = np.cumsum(p[order])
    kept = np.sort(order[: np.searchsorted(sums, settings.get("top_p", 1) * sums[-1]) + 1])
    ends = np.cumsum(p[kept]) / p[kept].sum()
    for seed in range(40):
        point = draw(np.zeros(size, np.float32), vocab_size=size, temperature=1.0, seed=seed) / size
        first, last = np.searchsorted(ends, [point - 1e-6, point + 1 / size + 1e-6])
        drawn = draw(logits, vocab_size=size, temperature=1.0, seed=seed, **settings)
        assert drawn in kept[first : last + 1]


def test_min_p_drops_the_unlikely() -> None:
    p = probabilities()
    kept = set(np.flatnonzero(p >= 0.2 * p.max() * (1 - 1e-5)))
    assert {draw(seed=seed, min_p=0.2) for seed in range(500)} <= kept


def test_logit_bias_forces_and_bans() -> None:
    assert draw(temperature=0.0, logit_bias=[(5, 100.0)]) == 5
    best = int(LOGITS.argmax())
    assert draw(temperature=0.0, logit_bias=[(best, -100.0)]) == np.argsort(-LOGITS)[1]


def test_frequency_penalty_counts_sampled_tokens_only() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[3], logits[4] = 5.0, 4.5
    one = sampler(temperature=0.0, frequency_penalty=0.3, prompt_token_ids=[3] * 50)
    assert [one.sample(logits)[0] for _ in range(4)] == [3, 3, 4, 3]


def test_presence_penalty_counts_once() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[3], logits[4] = 5.0, 4.5
    one = sampler(temperature=0.0, presence_penalty=1.0)
    assert [one.sample(logits)[0] for _ in range(4)] == [3, 4, 3, 3]


def test_repetition_penalty_counts_the_prompt_too() -> None:
    logits = np.full(VOCAB, -9.0, np.float32)
    logits[3], logits[4], logits[5] = 5.0, 4.5, -1.0
    assert draw(logits, temperature=0.0, repetition_penalty=1.2, prompt_token_ids=[3]) == 4
    logits[3] = logits[4] = -1.1  # negative logits move away from zero
    assert draw(logits, temperature=0.0, repetition_penalty=1.5, prompt_token_ids=[5]) == 3


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e40, 1e308])
def test_extreme_penalties_still_sample(penalty: float) -> None:
    for temperature in (0.0, 1.0):
        token = draw(
            temperature=temperature, repetition_penalty=penalty, prompt_token_ids=list(range(VOCAB)), seed=1
        )
        assert 0 <= token < VOCAB


def test_stop_tokens_wait_for_min_tokens() -> None:
    best = int(LOGITS.argmax())
    one = sampler(temperature=0.0, min_tokens=2, stop_token_ids=[best])
    assert [one.sample(LOGITS)[0] == best for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("temperature", [0.0, 0.2, 2.0])
def test_logprobs_are_the_models_own(temperature: float) -> None:
    log_p = np.log(probabilities())
    best = int(LOGITS.argmax())
    for settings in (
        {},
        {"logit_bias": [(best, -100.0)]},
        {"repetition_penalty": 1.5, "prompt_token_ids": [best]},
    ):
        token, entries = sampler(temperature=temperature, num_logprobs=5, seed=3, **settings).sample(LOGITS)
        assert entries[0][0] == token
        assert [i for i, _, _ in entries[1:]] == list(np.argsort(-LOGITS)[:5])
        assert [rank for _, _, rank in entries[1:]] == [1, 2, 3, 4, 5]
        assert entries[0][2] == 1 + (LOGITS[token] < LOGITS).sum()
        for i, logprob, _ in entries:
            assert logprob == pytest.approx(log_p[i], abs=2e-6)
            assert logprob <= 0


def test_no_alternatives_leave_the_sampled_token() -> None:
    token, entries = sampler(temperature=0.0, num_logprobs=0).sample(LOGITS)
    assert [i for i, _, _ in entries] == [token]
    assert sampler(temperature=0.0).sample(LOGITS)[1] is None


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    for setting in ({"logit_bias": [(VOCAB, 1.0)]}, {"stop_token_ids": [-1]}, {"prompt_token_ids": [VOCAB]}):
        with pytest.raises(ValueError, match="outside the vocabulary of 1000"):
            sampler(**setting)
