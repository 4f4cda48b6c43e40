"""The choice of the best round: the mean over clients, and no client alone."""

from collections.abc import Sequence

from pytest import mark

from wardround.engine.judging.judge import is_best
from wardround.engine.outcome import Progress


def choose(rounds: Sequence[Sequence[float]], metric: str = "dice") -> int | None:
    """The best round, counted from 1, of scores by client."""
    progress = Progress()
    for number, found in enumerate(rounds, start=1):
        scores = dict(zip("abcdefgh", found, strict=False))
        value = sum(found) / len(found)
        if is_best(metric, value, scores, progress):
            progress.best_round, progress.best_value, progress.best_scores = number, value, scores
    return progress.best_round


def test_the_best_mean_is_chosen() -> None:
    assert choose([[0.1, 0.2, 0.3], [0.4, 0.3, 0.3], [0.35, 0.3, 0.32]]) == 2
    assert choose([[9.0, 8.0, 7.0], [4.0, 6.0, 6.0]], "hd95") == 2
    assert choose([[0.2, 0.9], [0.8, 0.1], [0.9, 0.9]]) == 3  # of two clients the mean alone


@mark.parametrize("num_clients", [3, 4, 5, 8])
def test_one_client_cannot_choose_the_best_round_alone(num_clients: int) -> None:
    honest = [[value] * (num_clients - 1) for value in (0.1, 0.4, 0.6, 0.62, 0.63)]

    for liked in range(5):  # the round that the last client wants
        claims = [1.0 if number == liked else 0.0 for number in range(5)]
        assert choose([[*scores, claim] for scores, claim in zip(honest, claims, strict=True)]) == 5
