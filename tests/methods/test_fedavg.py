"""FedAvg: two rounds by hand, both weightings, who does not count."""

from pytest import approx

from toy import answer, client, federation, pull_to, rounds, state, weights
from wardround.methods.fedavg import FedAvg


def test_two_rounds_are_those_worked_out_by_hand() -> None:
    """F_north = (w - 1)²/2, three cases and steps; F_east = (w + 1)², one; rate 0.1, w - 0.1 F'.

    A step of north leaves 0.9 of the way to 1, a step of east 0.8 of the way to -1.
    Round 1 from 0.      north: 1 - 0.9³ = 0.271, east: -1 + 0.8 = -0.2
                         (3 · 0.271 + 1 · -0.2) / 4 = 0.613 / 4 = 0.15325
    Round 2 from 0.15325. north: 1 - 0.729 · 0.84675 = 0.38271925, east: -1 + 0.8 · 1.15325 = -0.0774
                         (3 · 0.38271925 - 0.0774) / 4 = 1.07075775 / 4 = 0.2676894375
    """
    members = [
        client("north", gradient=pull_to(1.0), steps=3, num_weights=1),
        client("east", gradient=pull_to(-1.0, curvature=2.0), steps=1, num_weights=1),
    ]
    first, second = rounds(FedAvg(), state([0.0]), members, 2, num_weights=1)

    assert first.notes["weights"] == {"north": 0.75, "east": 0.25}
    assert weights(first.params) == approx([0.15325], abs=1e-12)
    assert weights(second.params) == approx([0.2676894375], abs=1e-12)


def test_uniform_weights_forget_the_cases() -> None:
    members = [answer("north", [1.0, 4.0], examples=3), answer("east", [3.0, -2.0], examples=1)]
    after = FedAvg(weighting="uniform").run_round(state([9.0, 9.0]), federation(FedAvg(), members))

    assert weights(after.params) == [2.0, 1.0]  # (1 + 3) / 2, (4 - 2) / 2
    assert after.notes["weights"] == {"north": 0.5, "east": 0.5}


def test_one_client_alone_is_taken_as_it_is() -> None:
    after = FedAvg().run_round(
        state([9.0, 9.0]), federation(FedAvg(), [answer("north", [0.1, 0.7])], absent=2)
    )

    assert weights(after.params) == [0.1, 0.7] and after.notes["weights"] == {"north": 1.0}


def test_a_reply_that_is_not_finite_leaves_the_mean_of_the_rest() -> None:
    members = [
        answer("north", [1.0, 2.0], examples=1),
        answer("east", [float("nan"), 0.0], examples=8),
        answer("south", [5.0, 6.0], examples=3),
    ]
    after = FedAvg().run_round(state([0.0, 0.0]), federation(FedAvg(), members))

    assert weights(after.params) == [4.0, 5.0]  # (1 · 1 + 3 · 5) / 4, (1 · 2 + 3 · 6) / 4
    assert after.notes["weights"] == {"north": 0.25, "south": 0.75}
